"""The functions that a script is given as flags: those of the program on the stage."""

import stage


def model():
    return stage.now.made()


def dataset():
    return stage.now.given()


def task(net, batch):
    return stage.now.loss(net, batch)


def optimizer(net, opts):
    return stage.now.optimizer(net)
