"""A loop of one's own: that of the program that this process runs."""

import program

program.loop(program.now, {"run_dir": "runs/mine", "epochs": 9} | program.now.flags)
