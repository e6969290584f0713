"""python -m services.gateway"""

from services.gateway.app import GatewayApp
from services.gateway.config import GatewayConfig
from shared.io.service import run

if __name__ == "__main__":
    run(GatewayConfig, "gateway", GatewayApp)
