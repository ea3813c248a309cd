"""A world of ranks forked from the warm pytest process: milliseconds a world, where torchrun pays for
importing torch.

    from ranks import fork_ranks

    def sum_of_ones(world):                                # a real common.world.World, over gloo on loopback
        return world.all_sum(torch.ones(1)).item()

    assert fork_ranks(3, sum_of_ones) == [3, 3, 3]
"""

import gc
import multiprocessing
import multiprocessing.connection
import os
import signal
import socket
import sys
import time
import traceback
import uuid
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist
from police import end_with

from common import errors
from common.world import World
from common.world.world import pin

AFTERWARDS = 15  # seconds the others have once a rank has failed: peers fail of it too


def fork_ranks(size, function, *args, deadline=120, hang_timeout=30, may_die=(), node_size=None):
    """[function(world, *args) of each rank]; arguments are inherited, what is returned must be picklable.

    A rank that raises, dies or passes the deadline fails the test with its traceback, the first one first. A
    rank listed in `may_die` may end as it likes: its result is then its exit code (-9 for SIGKILL). Nothing
    survives the call. `node_size` splits the ranks over pretended nodes of so many. Before it, this process
    must neither have used a GPU nor more than one thread in torch: neither survives a fork (conftest.py sees
    to it).
    """
    import torch._dynamo  # noqa: F401  (DDP imports it: seconds, here once and not in every rank)

    sys.stdout.flush()
    sys.stderr.flush()
    world = World(0, size, 0, node_size or size, (torch.device("cpu"),), uuid.uuid4().hex[:12])
    end = time.monotonic() + deadline
    parent = os.getpid()
    pids = []
    pipes = {}
    answers = {}  # {rank: (it has not failed, its result or its last words)}, in the order in which they came
    failed = False
    try:
        with socket.create_server(("127.0.0.1", 0), backlog=256) as listener:  # inherited: no race for a port
            for rank in range(size):
                reader, writer = multiprocessing.Pipe(duplex=False)
                pids.append(os.fork())
                if pids[-1] == 0:
                    _live(replace(world, rank=rank), parent, listener, writer, hang_timeout, function, args)
                writer.close()
                pipes[reader] = rank
        while pipes and (left := end - time.monotonic()) > 0:
            for reader in multiprocessing.connection.wait([*pipes], left):
                rank = pipes.pop(reader)
                try:
                    answers[rank] = reader.recv()
                except EOFError:
                    answers[rank] = (False, "died")
                reader.close()
                if not answers[rank][0] and rank not in may_die:
                    failed = True
                    end = min(end, time.monotonic() + AFTERWARDS)
    finally:
        codes = [_end(pid) for pid in pids]
        for reader in pipes:
            reader.close()
    wrong = [
        f"rank {rank}, exit code {codes[rank]}: {said}" for rank, (well, said) in answers.items() if not well
    ]
    late = [f"rank {rank}: no answer in time, killed" for rank in pipes.values()]
    assert not late and not failed, "\n".join(wrong + late)
    return [answers[rank][1] if answers[rank][0] else codes[rank] for rank in range(size)]


def at_home(world):
    """A training in this process meets as this world; fork_ranks ends its ranks together."""
    from common import elastic

    def join(opts, placed):
        pin(opts)
        return replace(world, devices=tuple(map(torch.device, opts.devices)) or world.devices)

    elastic.join = join
    elastic.leave = lambda world: None


def _end(pid):
    """Kills a rank with its workers; its exit code. One that is leaving already keeps its own."""
    for kill, target in ((os.killpg, pid), (os.kill, pid)):  # it may not have made its group yet
        try:
            kill(target, signal.SIGKILL)
        except ProcessLookupError:
            pass
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _live(world, parent, listener, writer, hang_timeout, function, args):
    """A rank from birth to death; never returns, for pytest's own stack is above it."""
    code = 1
    answer = (False, "")
    errors.OTHER_RANKS_SECONDS = 0.0  # there is no agent to end them first
    gc.freeze()  # a search through all of torch's objects would copy each of their pages, 0.3 s
    try:
        os.setpgid(0, 0)
        end_with(parent)
        host, port = listener.getsockname()
        rank = world.rank
        size = world.size
        node, local_rank = divmod(rank, world.local_size)
        local_size = min(world.local_size, size - node * world.local_size)
        os.environ.update(
            RANK=str(rank),
            WORLD_SIZE=str(size),
            MASTER_ADDR=host,
            MASTER_PORT=str(port),
            LOCAL_RANK=str(local_rank),
            LOCAL_WORLD_SIZE=str(local_size),
            GROUP_RANK=str(node),
            GLOO_SOCKET_IFNAME="lo" if sys.platform == "linux" else "lo0",
        )
        store = None
        socket_fd = listener.detach()
        if rank or size == 1:
            os.close(socket_fd)  # rank 0's alone: its death must show
        if size > 1:
            patience = timedelta(seconds=hang_timeout)
            store = dist.TCPStore(
                host,
                port,
                is_master=rank == 0,
                wait_for_workers=False,
                timeout=patience,
                master_listen_fd=None if rank else socket_fd,
            )
            os.environ["TORCH_DIST_INIT_BARRIER"] = "1"  # no test lets a rank die before the others have it
            dist.init_process_group(
                "gloo", store=dist.PrefixStore("group", store), rank=rank, world_size=size, timeout=patience
            )
            del os.environ["TORCH_DIST_INIT_BARRIER"]
        world = replace(world, local_rank=local_rank, local_size=local_size, store=store)
        answer = (True, function(world, *args))
        code = 0
    except SystemExit as error:
        answer = (False, f"sys.exit({error.code!r})")
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        answer = (False, traceback.format_exc())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        try:
            writer.send(answer)
        except Exception:
            code = 1
            writer.send((False, traceback.format_exc()))
        while code == 0:
            signal.pause()  # until all have answered: rank 0 holds the store
        os._exit(code)
