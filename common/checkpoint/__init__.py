"""What lies on the disk: checkpoints that are written whole or not at all, verified, fenced."""

from common.checkpoint.disk import Damaged
from common.checkpoint.fence import Fence, Still
from common.checkpoint.folder import checkpoints, newest_first
from common.checkpoint.layout import Layout, facts_of
from common.checkpoint.reader import Reader, best_of, describe, read_facts, weights_of
from common.checkpoint.tensors import Image
from common.checkpoint.writer import Writer
