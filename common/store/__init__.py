"""Who owns the folder of a run, when it saves, and what it loads."""

from common.store.load import Loaded, load_newest, unreadable
from common.store.store import CheckpointStore
