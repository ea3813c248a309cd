"""What lies on the disk: checkpoints that are written whole or not at all, verified, fenced."""

from common.checkpoint.disk import Damaged, put_sealed, read_sealed
from common.checkpoint.fence import Fence, IdleTimer
from common.checkpoint.folder import OPTIMIZER, checkpoints, newest_first
from common.checkpoint.layout import Layout, facts_of
from common.checkpoint.reader import best_of, digest_of, read_facts, read_manifest, verify
from common.checkpoint.tensors import Image, read_file, specs_of, threads
from common.checkpoint.writer import Writer
