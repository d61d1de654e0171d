# The CUDA language and NCCL: tranche_has_CUDA, tranche_has_NCCL, and the targets CUDA::cudart_static and
# NCCL::nccl. CUDA sources belong to */cuda*. libcuda itself is never linked: a program that does not start on a
# machine without a driver is of no use there, not even to say what it lacks.
set(tranche_nvcc_found FALSE)
if(NOT TRANCHE_CUDA STREQUAL "OFF")
  include(CheckLanguage)
  if(NOT CMAKE_CUDA_COMPILER AND NOT DEFINED ENV{CUDACXX})
    # The toolkit's own folder is often not in PATH.
    find_program(tranche_nvcc nvcc HINTS ENV CUDA_HOME ENV CUDA_PATH PATHS /usr/local/cuda PATH_SUFFIXES bin)
    if(tranche_nvcc)
      set(CMAKE_CUDA_COMPILER ${tranche_nvcc})
    endif()
  endif()
  if(NOT CMAKE_CUDA_COMPILER)
    check_language(CUDA)
  endif()
  if(CMAKE_CUDA_COMPILER)
    set(tranche_nvcc_found TRUE)
  endif()
endif()
tranche_optional(CUDA ${tranche_nvcc_found})

if(tranche_has_CUDA)
  if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
    set(CMAKE_CUDA_ARCHITECTURES 80-real 90)  # with PTX of the last, which newer devices translate when they load it
  endif()
  enable_language(CUDA)
  # CMake before 3.25.2 does not know nvcc's flag for C++20 and would drop to C++17 without a word.
  foreach(kind STANDARD EXTENSION)
    if(NOT CMAKE_CUDA20_${kind}_COMPILE_OPTION)
      set(CMAKE_CUDA20_${kind}_COMPILE_OPTION "-std=c++20")
    endif()
  endforeach()
  set(CMAKE_CUDA_STANDARD 20)
  set(CMAKE_CUDA_STANDARD_REQUIRED ON)
  set(CMAKE_CUDA_EXTENSIONS OFF)
  set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
  find_package(CUDAToolkit REQUIRED)
endif()

if(tranche_has_CUDA AND NOT TRANCHE_NCCL STREQUAL "OFF")
  find_package(NCCL QUIET)
endif()
tranche_optional(NCCL "${NCCL_FOUND}")
