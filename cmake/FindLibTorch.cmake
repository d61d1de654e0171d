# Finds LibTorch in an unpacked libtorch or a wheel from PyPI, for CPU or CUDA. Defines LibTorch_FOUND, LibTorch_VERSION, LibTorch_CUDA
# (true if its CUDA parts compile here) and the target LibTorch::torch. If TRANCHE_TORCH is set (a variable of CMake or of the environment),
# only that folder is searched. Otherwise Torch_DIR (its share/cmake/Torch), Torch_ROOT, a CMAKE_PREFIX_PATH of
# torch.utils.cmake_prefix_path (its share/cmake), then CMAKE_PREFIX_PATH and the system are searched. Torch's own package file is not read,
# because that of a CUDA wheel is a fatal error without a CUDA toolkit.
#
# If none was found, LibTorch_reason has the reason. LibTorch_root is set even if the LibTorch there is unusable: older than 2.1, built for
# the C++ ABI before GCC 5, or with missing libraries so that it cannot be linked. The libraries are linked as flags for two reasons. CMake
# would warn that the wheel's folder hides the system's libgomp. And a program must have one OpenMP, the wheel's if both have the same name.
string(REPLACE ":" ";" LibTorch_prefixes "$ENV{CMAKE_PREFIX_PATH}")
list(PREPEND LibTorch_prefixes ${CMAKE_PREFIX_PATH})
set(LibTorch_seen_there)
if(LibTorch_prefixes)
  list(JOIN LibTorch_prefixes ", " LibTorch_seen_there)
  string(PREPEND LibTorch_seen_there ", CMAKE_PREFIX_PATH (" )
  string(APPEND LibTorch_seen_there ") and the system holding no include/torch/csrc/api/include/torch/torch.h")
endif()
set(LibTorch_reason "no LibTorch was found${LibTorch_seen_there}: -DTRANCHE_TORCH=FOLDER says where one lies, the folder torch of a wheel of PyPI or an \
unpacked libtorch")
set(LibTorch_named "${TRANCHE_TORCH}")
if(NOT LibTorch_named)
  set(LibTorch_named "$ENV{TRANCHE_TORCH}")
endif()
set(LibTorch_hints "${Torch_ROOT}")
if(Torch_DIR)
  list(APPEND LibTorch_hints "${Torch_DIR}/../../..")
endif()
foreach(prefix ${LibTorch_prefixes})
  if(EXISTS "${prefix}/Torch/TorchConfig.cmake")
    list(APPEND LibTorch_hints "${prefix}/../..")
  endif()
endforeach()
list(FILTER LibTorch_hints EXCLUDE REGEX "^$")
set(LibTorch_scope)
if(LibTorch_named)
  get_filename_component(LibTorch_named "${LibTorch_named}" ABSOLUTE)
  set(LibTorch_hints "${LibTorch_named}")
  set(LibTorch_scope NO_DEFAULT_PATH)  # another LibTorch does not replace the named one
  set(LibTorch_reason "${LibTorch_named} (TRANCHE_TORCH) holds no LibTorch: there is no \
include/torch/csrc/api/include/torch/torch.h. It is the folder torch of a wheel of PyPI, or an unpacked libtorch")
endif()
if(NOT "${LibTorch_asked}" STREQUAL "${LibTorch_hints}")  # the search was for another folder last time
  unset(LibTorch_API_DIR CACHE)
endif()
set(LibTorch_asked "${LibTorch_hints}" CACHE INTERNAL "")
find_path(LibTorch_API_DIR torch/torch.h HINTS ${LibTorch_hints} PATH_SUFFIXES include/torch/csrc/api/include ${LibTorch_scope})
set(LibTorch_usable FALSE)
set(LibTorch_root)
set(LibTorch_VERSION)
set(LibTorch_cxx11)
if(LibTorch_API_DIR)
  get_filename_component(LibTorch_INCLUDE_DIR "${LibTorch_API_DIR}/../../../.." ABSOLUTE)
  get_filename_component(LibTorch_root "${LibTorch_INCLUDE_DIR}" DIRECTORY)
  foreach(file ${LibTorch_INCLUDE_DIR}/torch/headeronly/version.h ${LibTorch_API_DIR}/torch/version.h)
    if(EXISTS ${file} AND NOT LibTorch_VERSION)
      foreach(part MAJOR MINOR PATCH)
        file(STRINGS ${file} LibTorch_line REGEX "^#define TORCH_VERSION_${part} +[0-9]+")
        string(REGEX REPLACE "^.*_${part} +([0-9]+).*$" "\\1" LibTorch_${part} "${LibTorch_line}")
      endforeach()
      if(LibTorch_line)
        set(LibTorch_VERSION ${LibTorch_MAJOR}.${LibTorch_MINOR}.${LibTorch_PATCH})
      endif()
    endif()
  endforeach()
  # Headers and libraries must come from the same folder; otherwise headers of one version compile with libraries of another.
  if(NOT "${LibTorch_seen}" STREQUAL "${LibTorch_root}")
    unset(LibTorch_cuda_INCLUDE_DIR CACHE)
    foreach(name c10 torch_cpu c10_cuda torch_cuda)
      unset(LibTorch_${name}_LIBRARY CACHE)
    endforeach()
  endif()
  set(LibTorch_seen "${LibTorch_root}" CACHE INTERNAL "")
  foreach(name c10 torch_cpu c10_cuda torch_cuda)
    find_library(LibTorch_${name}_LIBRARY NAMES ${name} HINTS ${LibTorch_root}
                 PATH_SUFFIXES lib lib/${CMAKE_LIBRARY_ARCHITECTURE} NO_DEFAULT_PATH)
    mark_as_advanced(LibTorch_${name}_LIBRARY)
  endforeach()
  if(LibTorch_c10_LIBRARY)
    # Checks a function of c10 itself, because libraries of the old ABI also have symbols of the new one, from the C++ library.
    file(STRINGS ${LibTorch_c10_LIBRARY} LibTorch_cxx11 REGEX "_ZN3c10[A-Za-z0-9_]*St7__cxx11" LIMIT_COUNT 1)
  endif()
  if(NOT LibTorch_VERSION)
    set(LibTorch_reason "the LibTorch in ${LibTorch_root} has no torch/version.h that says its version")
  elseif(LibTorch_VERSION VERSION_LESS 2.1)
    set(LibTorch_reason "the LibTorch in ${LibTorch_root} is version '${LibTorch_VERSION}', and Tranche needs 2.1 or later")
  elseif(NOT LibTorch_c10_LIBRARY OR NOT LibTorch_torch_cpu_LIBRARY)
    set(LibTorch_reason "the LibTorch in ${LibTorch_root} has no libc10 or no libtorch_cpu in its folder lib")
  elseif(NOT LibTorch_cxx11)
    set(LibTorch_reason "the LibTorch ${LibTorch_VERSION} in ${LibTorch_root} is built for the C++ ABI of before GCC 5, as wheels \
of PyPI up to 2.6 are: take a later wheel, or the download 'cxx11 ABI'")
  else()
    # Checks that it links: a CUDA wheel needs libraries that are in separate wheels.
    get_filename_component(LibTorch_lib ${LibTorch_torch_cpu_LIBRARY} DIRECTORY)
    set(LibTorch_link "-Wl,${LibTorch_torch_cpu_LIBRARY},${LibTorch_c10_LIBRARY},-rpath,${LibTorch_lib}")
    file(WRITE ${CMAKE_BINARY_DIR}/CMakeFiles/libtorch_trial.cpp
         "namespace at { int get_num_threads(); }\nint main() { return at::get_num_threads() < 0; }\n")
    try_compile(LibTorch_links ${CMAKE_BINARY_DIR}/CMakeFiles/libtorch_trial ${CMAKE_BINARY_DIR}/CMakeFiles/libtorch_trial.cpp
                LINK_LIBRARIES "${LibTorch_link}" OUTPUT_VARIABLE LibTorch_output)
    if(LibTorch_links)
      set(LibTorch_usable TRUE)
    else()
      set(LibTorch_why)
      foreach(pattern "[^ \n]+, needed by [^ \n]+, not found" "undefined reference to [^\n]+" "undefined symbol: [^\n]+"
              "[^\n]*(error|Error)[^\n]*")
        if(NOT LibTorch_why AND LibTorch_output MATCHES "${pattern}")
          set(LibTorch_why "${CMAKE_MATCH_0}")
        endif()
      endforeach()
      set(LibTorch_reason "a program does not link with the LibTorch ${LibTorch_VERSION} in ${LibTorch_root}: ${LibTorch_why}")
    endif()
    unset(LibTorch_links CACHE)  # missing libraries may be installed later
  endif()
endif()
mark_as_advanced(LibTorch_API_DIR)

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(LibTorch REQUIRED_VARS LibTorch_usable LibTorch_API_DIR VERSION_VAR LibTorch_VERSION
                                  REASON_FAILURE_MESSAGE "${LibTorch_reason}")

if(LibTorch_FOUND AND NOT TARGET LibTorch::torch)
  file(GLOB LibTorch_openmp ${LibTorch_root}/lib/libgomp-*.so* ${LibTorch_root}/../torch.libs/libgomp-*.so*)
  if(LibTorch_openmp)
    message(STATUS "LibTorch brings an OpenMP of its own (${LibTorch_openmp}): two in one process share no threads, so give each "
                   "half of the cores (OMP_NUM_THREADS)")
  endif()
  add_library(LibTorch::torch INTERFACE IMPORTED GLOBAL)
  set_target_properties(LibTorch::torch PROPERTIES
    INTERFACE_INCLUDE_DIRECTORIES "${LibTorch_INCLUDE_DIR};${LibTorch_API_DIR}"
    INTERFACE_LINK_LIBRARIES "${LibTorch_link}")
  # The CUDA parts. The wheel must have them, and CUDA's headers of its version must be beside it or in a toolkit.
  file(GLOB LibTorch_cuda_beside ${LibTorch_root}/../nvidia/*/include)
  find_path(LibTorch_cuda_INCLUDE_DIR cuda_runtime_api.h HINTS ${LibTorch_cuda_beside} ${CUDAToolkit_INCLUDE_DIRS}
            /usr/local/cuda/include)
  mark_as_advanced(LibTorch_cuda_INCLUDE_DIR)
  if(LibTorch_c10_cuda_LIBRARY AND LibTorch_torch_cuda_LIBRARY AND LibTorch_cuda_INCLUDE_DIR)
    add_library(LibTorch::cuda INTERFACE IMPORTED GLOBAL)
    # No symbol refers to torch_cuda; it registers its operators when it is loaded.
    set_target_properties(LibTorch::cuda PROPERTIES
      INTERFACE_COMPILE_DEFINITIONS TRANCHE_LIBTORCH_CUDA
      INTERFACE_INCLUDE_DIRECTORIES "${LibTorch_cuda_INCLUDE_DIR}"
      INTERFACE_LINK_LIBRARIES
      "LibTorch::torch;-Wl,--no-as-needed,${LibTorch_torch_cuda_LIBRARY},--as-needed,${LibTorch_c10_cuda_LIBRARY}")
  endif()
endif()
set(LibTorch_CUDA FALSE)
if(TARGET LibTorch::cuda)
  set(LibTorch_CUDA TRUE)
elseif(LibTorch_FOUND)
  set(LibTorch_reason "the LibTorch in ${LibTorch_root} has no CUDA parts (libc10_cuda, libtorch_cuda), or CUDA's headers \
(cuda_runtime_api.h) are neither beside it nor in a toolkit")
endif()
