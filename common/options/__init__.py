"""What was asked for: flags, the names they know, the code of a run.

No torch here: --help and a typo answer at once.
"""

from common.options.options import (
    FLAGS,
    OF_A_MACHINE,
    Options,
    as_imagefolder,
    read_options,
    read_run,
    with_folder,
)
from common.options.parser import begin_life, parse_options, read_arguments
from common.options.registry import DATASETS, MODELS, extra, find_function, flag_of, kind_of
from common.options.user import bytes_of, code_of, commit, files_of
