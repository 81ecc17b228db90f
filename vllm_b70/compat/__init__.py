"""What ties the plugin to one vLLM version: the supported range, the shape of every seam, patches.

The plugin works through vLLM's official registrations; ``seams`` lists what our subclasses rely on,
so that a vLLM that has moved on is refused in one sentence instead of failing in the middle of a
request. Where there is no official seam, a patch stands in a file of its own here.

The ledger of patches (each file says what, why, upstream, versions, and when it can go):

* ``mtp_head``: a clear refusal of speculation without an MTP head.
* ``auto_round``: AutoRound layers go through vLLM's registry of linear kernels.
* ``depth_metrics``: vLLM's Prometheus logger also shows our counts of draft depths.
* ``fla_autotune``: one configuration for each chunked gated-delta-net kernel on a GPU.
* ``state_blocks``: recurrent state is reserved by the depth of the drafts.
* ``prompt_rows``: the V2 model runner tells prompt chunks from other rows by position.
"""
