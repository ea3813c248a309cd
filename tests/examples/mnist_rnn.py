"""An LSTM over the rows of a picture, and BatchNorm."""

from beside import labelled
from program import Part
from torch import nn

BITWISE = True
OPTIONS = {"dataset": labelled(48, 4, 4)}


def net():
    def forward(net, x):
        rows, _ = net.lstm(x)
        return net.head(net.norm(rows[:, -1]))

    return Part(forward, lstm=nn.LSTM(4, 8, batch_first=True), norm=nn.BatchNorm1d(8), head=nn.Linear(8, 3))
