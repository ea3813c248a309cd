"""A loop of one's own: that of the program on the stage."""

import stage

stage.now.main()
