"""Chunked pipeline parallelism: a group of processes on one host, each of which computes a slice of the layers.

The node's process is stage 0; the other stages are its children.

    node's process = stage 0 --rows--> stage 1 --rows--> ... --rows--> last stage
           ^------------- layers written, logits ----------'---------------'

A step is cut into pieces. While stage 1 computes a piece, stage 0 computes the next one. All stages write KV into the
node's arena, so the data plane sends it as if a single process had computed it. Two neighbouring stages both have the
layers around their border. Which of the two computes these layers is decided for each piece (see seam), so that a stage
does not wait for a neighbour that is slower at the moment.
"""
