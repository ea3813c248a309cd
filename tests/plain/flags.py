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
