"""What ties the plugin to one vLLM version: the supported range and the shape of every seam.

The plugin patches no vLLM internal today. It subclasses vLLM's classes through official
registrations; ``seams`` lists what those subclasses rely on, so that a vLLM that has moved on is
refused in one sentence instead of failing in the middle of a request.
"""
