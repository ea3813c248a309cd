"""What was asked for: flags, the launcher's environment, a user's own code; and who a process is.

No torch here: --help and a typo answer at once.
"""
from common.options.environment import life_is_open
from common.options.options import Options, parse_options
from common.options.process import (
    agent_id,
    die_with_the_agent,
    end_of,
    holder_status,
    job_id,
    machine,
    machine_id,
    queued_again,
    this_process,
)
from common.options.user_code import call_user, find_user

__all__ = [
    "Options", "agent_id", "call_user", "die_with_the_agent", "end_of", "find_user", "holder_status",
    "job_id", "life_is_open", "machine", "machine_id", "parse_options", "queued_again", "this_process",
]
