#!/usr/bin/env python3
"""scripts/check_includes.py must find one violation of each kind, with its message, and accept what is allowed."""
import pathlib
import subprocess
import sys
import tempfile
import unittest

SCRIPT = pathlib.Path(__file__).resolve().parents[2] / "scripts" / "check_includes.py"

# The clean part of the fixture: every include in it is allowed.
CLEAN = {
    "include/tranche/version.h": "#pragma once\n",
    "include/tranche/tranche.h": '#include "tranche/engine/engine.h"\n#include "tranche/version.h"\n',
    "include/tranche/core/a.h": "#include <string>\n",
    "core/a.cpp": '#include "tranche/core/a.h"\n#include <fmt/core.h>\n#include <nlohmann/json.hpp>\n#include "core/b.h"\n',
    "core/b.h": "\n",
    "device/d.h": '#include "tranche/core/a.h"\n#include "core/b.h"\n',
    "device/cuda/d.h": "#include <cuda_runtime.h>\n",
    "partition/p.h": '#include "tranche/core/a.h"\n#include "tranche/version.h"\n',
    "include/tranche/kernels/k.h": '#include "tranche/core/a.h"\n',
    "kernels/private.h": '#include "device/d.h"\n',
    "kernels/cpu/k-inl.h": "\n",
    "kernels/cpu/k.cpp": '#include "kernels/cpu/k-inl.h"\n#include "hwy/foreach_target.h"\n',
    "kernels/cuda/k.cu": '#include "device/cuda/d.h"\n#include <cublasLt.h>\n',
    "comm/c.h": '#include "tranche/kernels/k.h"\n',
    "include/tranche/comm/mpi.h": "#include <mpi.h>\n",
    "comm/nccl_communicator.cpp": '#include <nccl.h>\n#include <cuda_runtime.h>\n#include "device/cuda/d.h"\n',
    "optim/o.h": '#include "tranche/kernels/k.h"\n',
    "offload/f.cpp": "#include <liburing.h>\n",
    "checkpoint/s.cpp": '#include <hdf5.h>\n#include "comm/c.h"\n',
    "report/r.h": '#include "tranche/engine/engine.h"\n',
    "include/tranche/engine/engine.h": '#include "tranche/core/a.h"\n',
    "engine/engine_e.cpp": '#include "tranche/engine/engine.h"\n#include "comm/c.h"\n#include "optim/o.h"\n',
    "engine/part.cpp": '#include "comm/c.h"\n',
    "include/tranche/libtorch.h": '#include "tranche/libtorch/t.h"\n#include "tranche/tranche.h"\n',
    "include/tranche/libtorch/t.h": '#include <torch/torch.h>\n#include "tranche/engine/engine.h"\n',
    "include/tranche/libtorch/detail/d.h": "/// Internal to the adapter.\n",
    "models/m.cpp": '#include "tranche/engine/engine.h"\n#include "tranche/kernels/k.h"\n#include "core/b.h"\n',
    "tools/main.cpp": '#include "tranche/tranche.h"\n#include "tranche/comm/mpi.h"\n',
    "tests/support/s.h": '#include <gtest/gtest.h>\n#include <fmt/core.h>\n',
    "tests/comm/t.cpp": '#include <mpi.h>\n#include "tests/support/s.h"\n#include "kernels/cpu/k-inl.h"\n',
    "tests/comm/beside.cpp": '#include "local.h"\n',
    "tests/comm/local.h": "\n",
    "tests/cuda_emulation/e.cpp": "#include <cublasLt.h>\n#include <nccl.h>\n",
    "bench/b.cpp": '#include "tests/support/s.h"\n',
    "examples/e.cpp": "#include <tranche/tranche.h>\n#include <mpi.h>\n",
    "engine/words.cpp": '// cudaMalloc in a comment\nconst char* key = "nccl"; /* __global__\n cuda */ char c = \'"\'; auto n = 1\'0;\n',
    "docs/not_a_source.cpp": "#include <mpi.h>\n",
}

# (file, its include, text of the complaint)
VIOLATIONS = [
    ("include/tranche/libtorch/x.h", '#include "core/b.h"', "a public header includes the private core/b.h"),
    ("include/tranche/engine/x.h", "/// Internal: a part.", "a public header that calls something internal"),
    ("tools/x.cpp", '#include "tranche/libtorch.h"', "nothing of the library knows its adapters"),
    ("models/x.cpp", "#include <ATen/ATen.h>", "<ATen/ATen.h> is LibTorch, which belongs only in libtorch.h, libtorch/*"),
    ("core/x.cpp", '#include "device/d.h"', "core/ (layer 0) includes device/ (layer 1)"),
    ("core/x.cpp", '  #  include "tranche/tranche.h"', "core/ (layer 0) includes report/ (layer 7)"),
    ("device/x.cpp", '#include "partition/p.h"', "device/ includes its neighbour partition/ (both layer 1)"),
    ("partition/x.cpp", '#include "device/d.h"', "partition/ includes its neighbour device/ (both layer 1)"),
    ("kernels/x.cpp", '#include "comm/c.h"', "kernels/ (layer 2) includes comm/ (layer 3)"),
    ("optim/x.cpp", '#include "comm/c.h"', "optim/ includes its neighbour comm/ (both layer 3)"),
    ("comm/x.cpp", '#include "optim/o.h"', "comm/ includes its neighbour optim/"),
    ("offload/x.cpp", '#include "comm/c.h"', "offload/ includes its neighbour comm/"),
    ("checkpoint/x.cpp", '#include "tranche/engine/engine.h"', "checkpoint/ (layer 4) includes engine/ (layer 5)"),
    ("engine/x.cpp", '#include "tranche/engine/engine.h"', "tranche/engine/engine.h is the façade, which parts"),
    ("engine/x.cpp", '#include "models/m.h"', "engine/ (layer 5) includes models/ (layer 7)"),
    ("engine/x.cpp", '#include "report/r.h"', "engine/ (layer 5) includes report/ (layer 7)"),
    ("models/x.cpp", '#include "report/r.h"', "models/ includes its neighbour report/ (both layer 7)"),
    ("models/x.cpp", '#include "comm/c.h"', "models/ includes comm/c.h: models see only public headers of device/, partition/, kernels/, comm/ and engine/"),
    ("models/x.cpp", '#include "optim/o.h"', "models/ includes optim/o.h: models see only public headers"),
    ("models/x.cpp", '#include "tools/t.h"', "models/ (layer 7) includes tools/ (layer 10)"),
    ("engine/x.cpp", '#include "kernels/cpu/k-inl.h"', "is internal to kernels/"),
    ("comm/mpi_x.cpp", '#include "device/cuda/d.h"', "is internal to device/"),
    ("core/x.cpp", '#include "tests/support/s.h"', "core/ includes tests/, which is for itself only"),
    ("core/x.cpp", '#include "tranche/core/missing.h"', "tranche/core/missing.h does not exist"),
    ("core/x.cpp", '#include "docs/not_a_source.cpp"', "is in no folder with a layer"),
    ("core/x.cpp", "#include <tranche/core/a.h>", 'is the users\' form: write #include "tranche/core/a.h"'),
    ("core/x.cpp", '#include "a.h"', 'is neither "tranche/<folder>/<public header>" nor "<folder>/<private header>"'),
    ("tests/x.cpp", '#include "local.h"', 'is neither "tranche/<folder>/<public header>"'),
    ("core/x.cpp", '#include "core/missing.h"', "core/missing.h does not exist"),
    ("core/x.cpp", '#include "core/a.h"', 'core/a.h is public: write #include "tranche/core/a.h"'),
    ("core/x.cpp", '#include "tranche/core/b.h"', 'tranche/core/b.h is private: write #include "core/b.h"'),
    ("models/x.cpp", '#include "kernels/private.h"', "models/ includes kernels/private.h: models see only public headers"),
    ("include/tranche/device/x.h", '#include "core/b.h"', "a public header includes the private core/b.h"),
    ("include/tranche/core/x.h", '#include "tranche/engine/engine.h"', "core/ (layer 0) includes engine/ (layer 5)"),
    ("include/tranche/engine/x.h", "int cudaMalloc;", "cudaMalloc is a name of CUDA's"),
    ("include/tranche/tranche.h", '#include "tranche/comm/mpi.h"', "tranche.h may include only headers of core, kernels, config, engine, report, not comm/"),
    ("engine/x.cpp", "#include <mpi.h>", "<mpi.h> is MPI, which belongs only in comm/mpi*"),
    ("comm/x.h", "#include <mpi.h>", "is MPI"),
    ("comm/x.cpp", "#include <nccl.h>", "<nccl.h> is NCCL, which belongs only in comm/nccl*"),
    ("device/x.cpp", "#include <cuda_runtime.h>", "is CUDA, which belongs only in */cuda*"),
    ("tests/x.cpp", "#include <cublasLt.h>", "is CUDA"),
    ("engine/x.cpp", "#include <hdf5.h>", "is HDF5, which belongs only in checkpoint/*"),
    ("comm/x.cpp", "#include <liburing.h>", "is liburing, which belongs only in offload/*"),
    ("core/x.h", "#include <nlohmann/json.hpp>", "<nlohmann/json.hpp> is heavy"),
    ("core/x.h", "#include <spdlog/spdlog.h>", "is heavy"),
    ("core/x.h", "#include <fmt/format.h>", "is heavy"),
    ("tools/x.cpp", "void* stream = cudaStreamCreate();", "cudaStreamCreate is a name of CUDA's"),
    ("comm/x.cpp", "ncclComm_t communicator;", "ncclComm_t is a name of CUDA's"),
    ("kernels/x.cpp", "__global__ void kernel();", "__global__ is a name of CUDA's"),
    ("kernels/x.cpp", "cublasLtHandle_t handle;", "cublasLtHandle_t is a name of CUDA's"),
    ("engine/x.cpp", "if (kind == DeviceKind::cuda) return;", "'cuda' in engine/, which serves every device"),
    ("models/x.cpp", "make_cuda_device(options);", "'cuda' in models/, which serves every device"),
    ("optim/x.cpp", "int NCCL = 1;", "'NCCL' in optim/, which serves every device"),
]


def run(root):
    done = subprocess.run([sys.executable, str(SCRIPT), str(root)], capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr


class CheckIncludes(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.root = pathlib.Path(self.folder.name)
        for file, text in CLEAN.items():
            self.write(file, text)
        for file in ("models/m.h", "tools/t.h"):
            self.write(file, "\n")

    def tearDown(self):
        self.folder.cleanup()

    def write(self, file, text):
        path = self.root / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")

    def test_a_clean_tree_passes(self):
        status, output, _ = run(self.root)
        self.assertEqual((status, output.splitlines()[-1]), (0, "check_includes: 38 files, 0 violations"), output)

    def test_each_violation_is_named_with_its_line(self):
        for file, include, text in VIOLATIONS:
            with self.subTest(file=file, include=include):
                old = CLEAN.get(file)
                self.write(file, f"// first line\n{include}\n")
                status, output, _ = run(self.root)
                complaints = output.splitlines()[:-1]
                self.assertEqual((status, len(complaints)), (1, 1), output)
                self.assertTrue(complaints[0].startswith(f"{file}:2: "), complaints[0])
                self.assertIn(text, complaints[0])
                if old is None:
                    (self.root / file).unlink()
                else:
                    self.write(file, old)

    def test_all_violations_are_reported_at_once(self):
        self.write("core/x.cpp", '#include <mpi.h>\n#include "tools/t.h"\n')
        status, output, _ = run(self.root)
        self.assertEqual((status, len(output.splitlines())), (1, 3), output)

    def test_a_tree_without_sources_is_not_a_success(self):
        with tempfile.TemporaryDirectory() as empty:
            status, _, errors = run(empty)
        self.assertEqual(status, 2)
        self.assertIn("no sources under", errors)


if __name__ == "__main__":
    unittest.main()
