import shlex
import sys
import tomllib

from tests.mutation_tool import config_of


def test_settings_of_a_module_run_its_tests_with_this_interpreter() -> None:
    settings = tomllib.loads(config_of("draftwire/method/keys.py", ["tests/unit/test_randomness.py"]))["cosmic-ray"]
    command = shlex.split(settings["test-command"])
    assert settings["module-path"] == "draftwire/method/keys.py"
    assert (command[0], command[-1]) == (sys.executable, "tests/unit/test_randomness.py")
    assert settings["filters"]["operators-filter"]["exclude-operators"]
