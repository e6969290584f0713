"""python -m services.cache_node"""

from __future__ import annotations

from services.cache_node.app import CacheNode
from services.cache_node.config import CacheNodeConfig
from shared.io.service import run

if __name__ == "__main__":
    run(CacheNodeConfig, "cache", CacheNode)
