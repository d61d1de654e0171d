# cmake -DSOURCE= -DWORK= -DCOMPILER= -DGENERATOR= -P broken_torch.cmake
# This test configures the project with folders that look like a LibTorch and cannot be used. With AUTO, CMake warns with the
# reason and configures the project without the adapter; with ON, the reason is a fatal error.
include(${CMAKE_CURRENT_LIST_DIR}/fake_torch.cmake)
file(REMOVE_RECURSE ${WORK})
file(MAKE_DIRECTORY ${WORK})
# All configurations use one build folder, so that the test fails if cache entries of one LibTorch are used for the next one.
set(options -S ${SOURCE} -B ${WORK}/build -G ${GENERATOR} -DCMAKE_CXX_COMPILER=${COMPILER} -DTRANCHE_PLAIN_KERNELS=ON
    -DTRANCHE_MPI=OFF -DTRANCHE_CUDA=OFF -DTRANCHE_URING=OFF -DTRANCHE_TESTS=OFF -DTRANCHE_BENCHES=OFF -DTRANCHE_EXAMPLES=OFF)

function(configure)
  execute_process(COMMAND ${CMAKE_COMMAND} -E env --unset=TRANCHE_TORCH ${CMAKE_COMMAND} ${options} ${ARGN} RESULT_VARIABLE status OUTPUT_VARIABLE output ERROR_VARIABLE output)
  string(REGEX REPLACE "[ \n]+" " " output "${output}")
  set(status "${status}" PARENT_SCOPE)
  set(output "${output}" PARENT_SCOPE)
endfunction()
function(expect_broken name text)
  configure(-DTRANCHE_LIBTORCH=AUTO -DTRANCHE_TORCH=${WORK}/${name})
  if(NOT status EQUAL 0 OR NOT output MATCHES "CMake Warning at [^:]*:[^:]*: Tranche: nothing of include/tranche/libtorch/ is compiled: [^ ]*${text}"
     OR NOT output MATCHES "-- Tranche: LIBTORCH OFF")
    message(FATAL_ERROR "AUTO with '${name}': status ${status}, wanted 0 and a warning '${text}': ${output}")
  endif()
  configure(-DTRANCHE_LIBTORCH=ON -DTRANCHE_TORCH=${WORK}/${name})
  if(status EQUAL 0 OR NOT output MATCHES "CMake Error at [^:]*:[^:]*: TRANCHE_LIBTORCH=ON, but [^ ]*${text}")
    message(FATAL_ERROR "ON with '${name}': status ${status}, wanted an error '${text}': ${output}")
  endif()
endfunction()

file(MAKE_DIRECTORY ${WORK}/empty)
expect_broken(empty "/empty .TRANCHE_TORCH. holds no LibTorch")

# Debian 12 installs LibTorch with its headers in include/ and its libraries in lib/<architecture>/.
fake_torch(${WORK}/debian 1.13 "${fake_new_abi}")
file(RENAME ${WORK}/debian/lib ${WORK}/debian/its)
file(MAKE_DIRECTORY ${WORK}/debian/lib)
file(RENAME ${WORK}/debian/its ${WORK}/debian/lib/x86_64-linux-gnu)
expect_broken(debian "the LibTorch in [^ ]*/debian is version '1.13.0', and Tranche needs 2.1 or later")

fake_torch(${WORK}/old_abi 2.6 "${fake_old_abi}")
expect_broken(old_abi "the LibTorch 2.6.0 in [^ ]*/old_abi is built for the C.. ABI of before GCC 5")

fake_torch(${WORK}/unnumbered "" "${fake_new_abi}")
expect_broken(unnumbered "the LibTorch in [^ ]*/unnumbered has no torch/version.h")

fake_torch(${WORK}/half 2.15 "${fake_new_abi}")
file(REMOVE ${WORK}/half/lib/libtorch_cpu.so)
expect_broken(half "the LibTorch in [^ ]*/half has no libc10 or no libtorch_cpu")

# The library files are truncated, as after an interrupted download.
fake_torch(${WORK}/cut_off 2.15 "${fake_new_abi}")
expect_broken(cut_off "a program does not link with the LibTorch 2.15.0 in [^ ]*/cut_off: [^ ]*.*lib(c10|torch_cpu).so")

# This is a CUDA wheel without the wheels of the libraries that it links.
fake_torch(${WORK}/alone 2.15 "")
function(library name code)
  file(WRITE ${WORK}/${name}.cpp "${code}")
  execute_process(COMMAND ${COMPILER} -shared -fPIC -o ${WORK}/alone/lib/lib${name}.so ${WORK}/${name}.cpp -L${WORK}/alone/lib ${ARGN}
                  COMMAND_ERROR_IS_FATAL ANY)
endfunction()
library(c10 "#include <string>\nnamespace c10 { void demangle(std::string) {} }\n")
library(gpu_runtime "void gpu_runtime() {}\n")
library(torch_cpu "void gpu_runtime();\nnamespace at { int get_num_threads() { gpu_runtime(); return 1; } }\n" -lgpu_runtime)
configure(-DTRANCHE_LIBTORCH=ON -DTRANCHE_TORCH=${WORK}/alone "-DCMAKE_EXE_LINKER_FLAGS=-Wl,-rpath-link,${WORK}/alone/lib")
if(NOT status EQUAL 0 OR NOT output MATCHES "-- Tranche: LIBTORCH ON")
  message(FATAL_ERROR "with what it asks for: status ${status}: ${output}")
endif()
# PyTorch's documentation sets CMAKE_PREFIX_PATH to share/cmake in the wheel's folder.
file(WRITE ${WORK}/alone/share/cmake/Torch/TorchConfig.cmake "message(FATAL_ERROR \"it is not to be read\")\n")
set(rpath "-DCMAKE_EXE_LINKER_FLAGS=-Wl,-rpath-link,${WORK}/alone/lib")
configure(-DTRANCHE_LIBTORCH=ON -UTRANCHE_TORCH -DCMAKE_PREFIX_PATH=${WORK}/alone/share/cmake ${rpath})
if(NOT status EQUAL 0 OR NOT output MATCHES "-- Tranche: LIBTORCH ON")
  message(FATAL_ERROR "with torch's prefix path: status ${status}: ${output}")
endif()
set(ENV{CMAKE_PREFIX_PATH} "/nowhere:${WORK}/alone/share/cmake")
configure(-DTRANCHE_LIBTORCH=ON -UTRANCHE_TORCH -UCMAKE_PREFIX_PATH ${rpath})
unset(ENV{CMAKE_PREFIX_PATH})
if(NOT status EQUAL 0 OR NOT output MATCHES "-- Tranche: LIBTORCH ON")
  message(FATAL_ERROR "with torch's prefix path in the environment: status ${status}: ${output}")
endif()
file(REMOVE ${WORK}/alone/lib/libgpu_runtime.so)
expect_broken(alone "a program does not link with the LibTorch 2.15.0 in [^ ]*/alone: libgpu_runtime.so, needed by")

# If there is no LibTorch and none was named, CMake does not warn.
configure(-DTRANCHE_LIBTORCH=AUTO -UTRANCHE_TORCH
          "-DCMAKE_IGNORE_PATH=/usr/include/torch/csrc/api/include\\;/usr/local/include/torch/csrc/api/include")
if(NOT status EQUAL 0 OR output MATCHES "CMake Warning" OR NOT output MATCHES
   "-- Tranche: nothing of include/tranche/libtorch/ is compiled: no LibTorch was found: -DTRANCHE_TORCH=FOLDER")
  message(FATAL_ERROR "AUTO without any: status ${status}: ${output}")
endif()
configure(-DTRANCHE_LIBTORCH=AUTO -UTRANCHE_TORCH -DCMAKE_PREFIX_PATH=${WORK}/empty
          "-DCMAKE_IGNORE_PATH=/usr/include/torch/csrc/api/include\\;/usr/local/include/torch/csrc/api/include")
if(NOT status EQUAL 0 OR NOT output MATCHES
   "no LibTorch was found, CMAKE_PREFIX_PATH .[^ ]*/empty. and the system holding no include/[^ ]*torch.h: -DTRANCHE_TORCH=FOLDER")
  message(FATAL_ERROR "AUTO with a prefix path of no use: status ${status}: ${output}")
endif()
configure(-UCMAKE_PREFIX_PATH -DTRANCHE_LIBTORCH=ON -DTRANCHE_SANITIZE=address -DTRANCHE_TORCH=${WORK}/empty)
if(status EQUAL 0 OR NOT output MATCHES "TRANCHE_LIBTORCH=ON, but LibTorch is not built with sanitizers")
  message(FATAL_ERROR "ON with sanitizers: status ${status}: ${output}")
endif()
