"""What was asked for: flags, the launcher's environment, a user's own code; and who a process is.

No torch here: --help and a typo answer at once.
"""
from common.options.environment import agents_flag, begin_life, life_is_open
from common.options.fork import read_options
from common.options.options import Options, parse_options
from common.options.process import agent_id, end_of, holder_status, machine_id, queued_again, this_process
from common.options.user_code import call_user, find_user

__all__ = [
    "Options", "agent_id", "agents_flag", "begin_life", "call_user", "end_of", "find_user", "holder_status",
    "life_is_open", "machine_id", "parse_options", "queued_again", "read_options", "this_process",
]
