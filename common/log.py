"""stub"""
import sys


def say(text, stream=None):
    print(text, file=stream or sys.stdout, flush=True)
