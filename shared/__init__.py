"""What Tsukimi's services share, in layers: protocol <- core <- {io, dataplane, engine}."""
