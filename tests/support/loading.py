"""A KV connector for vLLM's scheduler without a model: every other prompt's KV comes from elsewhere, after some steps.

Runs in vLLM's environment; vLLM imports it by name. Each fifth of those loads fails, and its prompt is computed.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, SupportsHMA
from vllm.v1.outputs import KVConnectorOutput

STEPS = 3
"""That a load takes."""


class Loading(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]  # vLLM is not installed where types are checked
    """The scheduler's side; the other one would move the data."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._asked: set[str] = set()
        self._loads: dict[str, tuple[int, set[int]]] = {}
        """By request: steps to go, and the blocks that it loads into."""

    def loaded(self) -> KVConnectorOutput:
        """What a step's output says: whose load is over, and which blocks did not come."""
        self._loads = {name: (steps - 1, blocks) for name, (steps, blocks) in self._loads.items()}
        over = {name: blocks for name, (steps, blocks) in self._loads.items() if steps <= 0}
        for name in over:
            del self._loads[name]
        failed = [blocks for name, blocks in over.items() if int(name) % 10 == 0]
        return KVConnectorOutput(finished_recving=set(over), invalid_block_ids=set().union(*failed))

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """All of a prompt but its last token, once."""
        size = self._vllm_config.cache_config.block_size
        found = (request.num_prompt_tokens - 1) // size * size - num_computed_tokens
        if int(request.request_id) % 2 or request.request_id in self._asked or found <= 0:
            return 0, False
        return found, True

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """A load begins where there is something to load."""
        if num_external_tokens:
            self._asked.add(request.request_id)
            self._loads[request.request_id] = (STEPS, set(blocks.get_block_ids()[0]))

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """Nothing to say to the other side."""
        del scheduler_output
        return KVConnectorMetadata()

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        """Its blocks may go at once."""
        del request, block_ids
        return False, None

    def start_load_kv(self, *args: Any, **kwargs: Any) -> None:
        """Of the other side, as the following."""

    def wait_for_layer_load(self, *args: Any, **kwargs: Any) -> None:
        """Never called."""

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None:
        """Never called."""

    def wait_for_save(self) -> None:
        """Never called."""
