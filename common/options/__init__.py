"""What was asked for: flags, and functions of a user's own.

No torch here: --help and a typo answer at once.
"""

from common.options.options import (
    Options,
    as_imagefolder,
    begin_life,
    call_user,
    find_user,
    parse_options,
    read_options,
    refuse_foreign_code,
)
