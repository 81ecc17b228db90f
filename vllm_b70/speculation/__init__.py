"""Speculative decoding: the schedule of draft depths by batch size."""
