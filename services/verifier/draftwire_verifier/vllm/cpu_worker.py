"""vLLM's worker on a CPU whose KV cache takes what our own engine's would: `worker_cls`. Imports vLLM."""

from vllm.utils.cpu_resource_utils import get_allowed_cpu_list, get_memory_node_info
from vllm.v1.worker.cpu_worker import CPUWorker

from draftwire.engine.memory import CPU_SHARE, CpuMeter
from draftwire_verifier.vllm.cache_bytes import most_bytes


class MeasuringWorker(CPUWorker):  # type: ignore[misc]
    """Takes a share of what is left. vLLM's own takes one of all that the machine has, free or not."""

    def determine_available_memory(self) -> int:
        """Returns what the KV cache may take, once the weights are loaded and a step has been run, bytes."""
        meter = CpuMeter(self.parallel_config.world_size)
        meter.begin()
        self.model_runner.warming_up_model()
        own = get_memory_node_info(get_allowed_cpu_list()[0].numa_node)  # vLLM takes memory of no other node
        of_node = int(CPU_SHARE * own.available_memory)
        return min(meter.free(1).num_bytes, of_node, most_bytes(self.vllm_config))
