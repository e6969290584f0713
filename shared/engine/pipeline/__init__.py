"""Chunked pipeline parallelism: a group of processes on one host, each of which computes a slice of the layers.

    node's process = stage 0 --rows--> stage 1 --rows--> ... --rows--> last stage
           ^------------- layers written, logits ----------'---------------'

A step is cut into pieces; while stage 1 computes a piece, stage 0 computes the next one. All stages write KV into the
node's arena, so the data plane sends it as if one process had computed. Neighbours share the layers around their border,
and which of them computes these is settled piece by piece (seam): so none waits for one that is slower at the moment.
"""
