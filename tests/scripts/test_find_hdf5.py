#!/usr/bin/env python3
"""FindHDF5Serial: if pkg-config has no hdf5-serial (on all systems but Debian), CMake's own module finds HDF5."""
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
CMAKE = sys.argv.pop(1)
PROJECT = """cmake_minimum_required(VERSION 3.25)
project(user LANGUAGES CXX)
list(PREPEND CMAKE_MODULE_PATH MODULES)
find_package(HDF5Serial REQUIRED)
add_executable(user user.cpp)
target_link_libraries(user PRIVATE HDF5::serial)
"""
PROGRAM = """#include <hdf5.h>
#include <cstdio>
int main() {
  unsigned a = 0, b = 0, c = 0;
  if (H5get_libversion(&a, &b, &c) < 0) return 1;
  std::printf("%u.%u.%u", a, b, c);
}
"""


def of_debian(flags):
    """A folder from hdf5-serial.pc, by --cflags-only-I or --libs-only-L; None if there is no such package."""
    result = subprocess.run(["pkg-config", flags, "hdf5-serial"], stdout=subprocess.PIPE, text=True)
    return result.stdout.split()[0][2:] if result.returncode == 0 else None


class FindHdf5(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = pathlib.Path(folder.name).resolve()
        (self.root / "CMakeLists.txt").write_text(PROJECT.replace("MODULES", str(ROOT / "cmake")))
        (self.root / "user.cpp").write_text(PROGRAM)
        (self.root / "no_packages").mkdir()

    def prefix(self):
        """An HDF5 as other systems install it, made from this machine's: include/ and lib/ in one prefix, shared libraries only."""
        made = self.root / "prefix"
        shutil.copytree(of_debian("--cflags-only-I"), made / "include")
        (made / "lib").mkdir()
        for library in pathlib.Path(of_debian("--libs-only-L")).resolve().glob("libhdf5.so*"):
            (made / "lib" / library.name).symlink_to(library)
        return made

    def configure(self, *flags):
        # pkg-config knows no package, and no compiler wrapper shows CMake's module another HDF5.
        command = [CMAKE, "-E", "env", f"PKG_CONFIG_LIBDIR={self.root / 'no_packages'}", "PKG_CONFIG_PATH=", CMAKE, "-S", str(self.root),
                   "-B", str(self.root / "build"), "-G", "Ninja", *flags]
        return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def test_one_prefix(self):
        made = self.prefix()
        result = self.configure(f"-DHDF5_ROOT={made}", "-DHDF5_NO_FIND_PACKAGE_CONFIG_FILE=ON", "-DHDF5_C_COMPILER_EXECUTABLE=none")
        self.assertEqual(result.returncode, 0, result.stdout)
        self.assertIn(f"Found HDF5Serial: {made}/lib/libhdf5.so", result.stdout)
        subprocess.run([CMAKE, "--build", str(self.root / "build")], check=True, stdout=subprocess.DEVNULL)
        version = subprocess.run([str(self.root / "build/user")], stdout=subprocess.PIPE, text=True, check=True).stdout
        header = (made / "include/H5public.h").read_text()
        self.assertEqual(version, ".".join(re.search(rf"#define H5_VERS_{part}\s+(\d+)", header)[1] for part in ("MAJOR", "MINOR", "RELEASE")))

    def test_the_mpi_variant_is_refused(self):
        made = self.prefix()
        settings = made / "include/H5pubconf.h"
        settings.write_text(settings.read_text() + "\n#define H5_HAVE_PARALLEL 1\n")
        result = self.configure(f"-DHDF5_ROOT={made}", "-DHDF5_NO_FIND_PACKAGE_CONFIG_FILE=ON", "-DHDF5_C_COMPILER_EXECUTABLE=none")
        self.assertNotEqual(result.returncode, 0)
        self.assertRegex(" ".join(result.stdout.split()), r"the HDF5 that was found \(.*\) is the MPI variant, and checkpoints are "
                         r"written by the serial one \(-DHDF5_ROOT=FOLDER says where one lies\)")

    def test_none(self):
        result = self.configure("-DCMAKE_DISABLE_FIND_PACKAGE_HDF5=ON")
        self.assertNotEqual(result.returncode, 0)
        self.assertIn("the serial HDF5 with its headers was not found: it is Debian's package libhdf5-dev (scripts/setup.sh), hdf5-devel "
                      "or hdf5 elsewhere (-DHDF5_ROOT=FOLDER says where one lies)", " ".join(result.stdout.split()))


if __name__ == "__main__":
    if of_debian("--cflags-only-I") is None:
        print("skipped: this test makes its prefix of Debian's serial HDF5, which is not here")
        sys.exit(77)
    unittest.main()
