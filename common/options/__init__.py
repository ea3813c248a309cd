"""What was asked for: flags, the names they know, functions of a user's own.

No torch here: --help and a typo answer at once.
"""

from common.options.options import Options, as_imagefolder, read_options, with_folder
from common.options.parser import begin_life, parse_options, read_arguments
from common.options.registry import DATASETS, MODELS, kind_of
from common.options.user import call_user, extra, find_function, refuse_foreign_code
