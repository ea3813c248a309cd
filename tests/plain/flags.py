"""The functions that train_ddp.py is given as flags: those of the program that this process runs."""

import program


def model():
    return program.now.made()


def dataset():
    return program.now.given()


def task(net, batch):
    return program.now.task(net, batch)


def optimizer(net, opts):
    return program.now.optimizer(net)


def schedule(step, total, opts):
    return program.now.schedule(step, total)
