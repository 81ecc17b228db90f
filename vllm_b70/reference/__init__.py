"""The ops in plain torch, one addition at a time: the oracle of every test. Slow on purpose."""
