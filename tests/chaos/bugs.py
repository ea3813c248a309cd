"""Mistakes that the campaign must find, each put into the worker by hand: a campaign that cannot fail proves
nothing.
"""


def no_rescue():
    """Survivors leave without saving."""
    from common.store import CheckpointStore

    CheckpointStore.rescue = lambda self, why: ""


def position_ahead():
    """What was fetched counts as trained on; behind an epoch's end no life could begin."""
    from common.training import TrainState

    real = TrainState.facts
    TrainState.facts = lambda self: (
        (facts := real(self)) | {"position": min(facts["position"] + 1, self.progress.samples)}
    )


def optimizer_forgotten():
    """A resumed run starts with fresh moments."""
    from common.training import TrainState

    real = TrainState.load

    def load(self, facts, remembered):
        real(self, facts, remembered)
        for values in self.optimizer.state.values():
            for value in values.values():
                value.zero_()

    TrainState.load = load


def orphans():
    """Workers outlive their agent."""
    from common.options import parser

    parser.die_with_the_parent = lambda: None


def loaders_hold_up_their_rank():
    """Where an error ends a rank, it stands until the hang limit, as if other loading processes kept it."""
    import time

    from common.rescue import Rescue

    real = Rescue.__exit__

    def held(self, kind, error, trace):
        if error is not None:
            time.sleep(30)
        return real(self, kind, error, trace)

    Rescue.__exit__ = held


def named_too_early():
    """Files are written under the name that counts, not aside."""
    from common.checkpoint.folder import folder_name, free_number
    from common.checkpoint.writer import Writer

    def aside(self, step):
        return self.root / folder_name(step, free_number(self.root, step))

    Writer._aside = aside
