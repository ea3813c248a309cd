"""What was asked for: flags, the launcher's environment, a user's own code. No torch here."""
from common.options.environment import flag_in, life_is_open
from common.options.options import Options, parse_options
from common.options.process import (
    die_with_the_agent,
    end_of,
    job_id,
    machine,
    machine_id,
    process_start,
    process_state,
    queued_again,
    this_agent,
    this_boot,
)
from common.options.user_code import call_user

__all__ = [
    "Options", "call_user", "die_with_the_agent", "end_of", "flag_in", "job_id", "life_is_open",
    "machine", "machine_id", "parse_options", "process_start", "process_state", "queued_again",
    "this_agent", "this_boot",
]
