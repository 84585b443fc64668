"""The parts of tools/tune.py, which searches tiles: space, search, scratch builds, gates, leaderboard."""
