"""An earlier name of ``cdc_assets.snapshot.python_daemon``, kept for one release."""

import runpy

if __name__ == "__main__":
    runpy.run_module("cdc_assets.snapshot.python_daemon", run_name="__main__", alter_sys=True)
