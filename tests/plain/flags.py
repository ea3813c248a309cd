"""The functions that a script is given as flags: those of the program that this process runs."""

import program


def model():
    return program.now.made()


def dataset():
    return program.now.given()


def task(net, batch):
    return program.now.loss(net, batch)


def optimizer(net, opts):
    return program.now.optimizer(net)


def annealed(net, batch, progress):
    program.now.at = progress.step
    return program.now.loss(net, batch)


def lr_schedule(step, total, opts):
    return program.now.warm(step)
