# Finds the libraries that Tranche needs; nothing is downloaded. All except CUDA and NCCL are Debian packages (scripts/setup.sh).
# cmake/tranche-config.cmake.in must find again what is found here and linked by our libraries.
set(CMAKE_FIND_PACKAGE_TARGETS_GLOBAL ON)  # projects that add_subdirectory() us link them too
find_package(Threads REQUIRED)
find_package(OpenMP REQUIRED COMPONENTS CXX)
find_package(PkgConfig REQUIRED)
find_package(nlohmann_json 3.10 REQUIRED)
find_package(spdlog REQUIRED)
find_package(fmt REQUIRED)
find_package(hwy REQUIRED)
set(HDF5Serial_SHARED ${TRANCHE_SHARED})
find_package(HDF5Serial REQUIRED)  # HDF5::serial
find_path(tranche_xxhash_include xxhash.h)  # headers only
mark_as_advanced(tranche_xxhash_include)
if(NOT tranche_xxhash_include)
  message(FATAL_ERROR "xxhash.h was not found: it is in Debian's package libxxhash-dev (scripts/setup.sh)")
endif()
# For tokenizers: patterns, normalization form C, and the models of Llama 2 and Mistral.
pkg_check_modules(pcre2 REQUIRED IMPORTED_TARGET GLOBAL libpcre2-8)        # PkgConfig::pcre2
pkg_check_modules(utf8proc REQUIRED IMPORTED_TARGET GLOBAL libutf8proc)    # PkgConfig::utf8proc
pkg_check_modules(sentencepiece REQUIRED IMPORTED_TARGET GLOBAL sentencepiece)  # PkgConfig::sentencepiece
if(NOT TRANCHE_PLAIN_KERNELS)
  pkg_check_modules(OpenBLAS REQUIRED IMPORTED_TARGET GLOBAL openblas)  # PkgConfig::OpenBLAS
  find_package(OneDNN REQUIRED)                                        # OneDNN::dnnl
endif()

# tranche_optional(<BACKEND> <found> [reason if not found]): turns AUTO/ON/OFF into tranche_has_<BACKEND>.
function(tranche_optional backend found)
  if(TRANCHE_${backend} STREQUAL "ON" AND NOT found)
    set(why "it was not found")
    if(ARGN)
      set(why "${ARGN}")
    endif()
    message(FATAL_ERROR "TRANCHE_${backend}=ON, but ${why}")
  endif()
  set(has OFF)
  if(found AND NOT TRANCHE_${backend} STREQUAL "OFF")
    set(has ON)
  endif()
  set(tranche_has_${backend} ${has} PARENT_SCOPE)
  message(STATUS "Tranche: ${backend} ${has}")
endfunction()

if(NOT TRANCHE_MPI STREQUAL "OFF")
  set(MPI_CXX_SKIP_MPICXX ON)
  find_package(MPI QUIET COMPONENTS C)
endif()
tranche_optional(MPI "${MPI_C_FOUND}")

include(TrancheCuda)

if(NOT TRANCHE_URING STREQUAL "OFF")
  pkg_check_modules(liburing QUIET IMPORTED_TARGET GLOBAL liburing)  # PkgConfig::liburing
endif()
tranche_optional(URING "${liburing_FOUND}")
