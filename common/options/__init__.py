"""What was asked for: flags, the launcher's environment, a user's own code; and who a process is.

No torch here: --help and a typo answer at once.
"""
from common.options.environment import begin_life, life_is_open
from common.options.fork import read_options
from common.options.options import Options, parse_options
from common.options.process import end_of, has_ended, machine_id, this_process
from common.options.user_code import call_user, find_user

__all__ = [
    "Options", "begin_life", "call_user", "end_of", "find_user", "has_ended", "life_is_open",
    "machine_id", "parse_options", "read_options", "this_process",
]
