"""Forward passes by OpenVINO's CPU plugin, for models of the Llama family; see docs/cpu.md."""
