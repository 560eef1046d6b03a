"""These test modules import megatron.core at their top, so the host is prepared before they are collected."""

from torpor.megatron.host import prepare_host

prepare_host()
