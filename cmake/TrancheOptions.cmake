# Options of the build. AUTO uses a backend if it is found; ON makes its absence an error.
include(GNUInstallDirs)

foreach(backend MPI CUDA NCCL URING LIBTORCH)
  set(TRANCHE_${backend} AUTO CACHE STRING "Build with ${backend}: AUTO, ON or OFF")
  set_property(CACHE TRANCHE_${backend} PROPERTY STRINGS AUTO ON OFF)
endforeach()
# EMULATED compiles kernels for the CPU and uses the CUDA libraries of tests/cuda_emulation; it needs the toolkit's headers. EMULATED_AUTO
# does the same if they are found, else it is OFF.
set_property(CACHE TRANCHE_CUDA PROPERTY STRINGS AUTO ON OFF EMULATED EMULATED_AUTO)
if(NOT TRANCHE_CUDA MATCHES "^(AUTO|ON|OFF|EMULATED|EMULATED_AUTO)$")
  message(FATAL_ERROR "TRANCHE_CUDA is '${TRANCHE_CUDA}': AUTO, ON, OFF, EMULATED or EMULATED_AUTO")
endif()
option(TRANCHE_TESTS "Build the tests" ${PROJECT_IS_TOP_LEVEL})
option(TRANCHE_BENCHES "Build the benches" ${PROJECT_IS_TOP_LEVEL})
option(TRANCHE_EXAMPLES "Build the examples" ${PROJECT_IS_TOP_LEVEL})
option(TRANCHE_INSTALL "Make install rules" ${PROJECT_IS_TOP_LEVEL})
option(TRANCHE_WERROR "Make warnings errors" OFF)
option(TRANCHE_SHARED "Make shared libraries, not static ones" OFF)
option(TRANCHE_WHOLE_TESTS "Make a test program one test, not each of its cases" OFF)
option(TRANCHE_PLAIN_KERNELS "Matmul by plain loops, no BLAS and no oneDNN (for sanitizers)" OFF)
set(TRANCHE_SANITIZE "" CACHE STRING "Sanitizers: address,undefined or thread")

if(PROJECT_IS_TOP_LEVEL)
  if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
    set(CMAKE_BUILD_TYPE Release CACHE STRING "Build type" FORCE)
  endif()
  set(CMAKE_RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/bin)
  set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
  # Installed programs and libraries find each other wherever the installation is moved to.
  set(CMAKE_INSTALL_RPATH $ORIGIN $ORIGIN/../${CMAKE_INSTALL_LIBDIR})
  set(CMAKE_INSTALL_RPATH_USE_LINK_PATH ON)
  # A program is not linked again when one of our shared libraries was, because it calls the new code in any case.
  set(CMAKE_LINK_DEPENDS_NO_SHARED ON)
  find_program(tranche_ccache ccache)
  if(tranche_ccache AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
    set(CMAKE_CXX_COMPILER_LAUNCHER ${tranche_ccache})
  endif()
endif()

# Public headers are included as "tranche/<folder>/<name>.h", in the tree and after installation.
set(tranche_include_dir ${PROJECT_SOURCE_DIR}/include)

# Flags of our targets, which users do not inherit. Contraction is off because a source must give the same bits with every instruction set.
add_library(tranche_flags INTERFACE)
target_compile_features(tranche_flags INTERFACE cxx_std_20)
# Private headers are beside their sources and are included as "<folder>/<name>.h".
target_include_directories(tranche_flags INTERFACE ${PROJECT_SOURCE_DIR})
# -Wstrict-aliasing=2 sees a vector that is read as elements of another type; the level of -Wall does not.
# -Wrestrict warns of overlaps inside std::string that cannot happen (GCC bug 105651, GCC 12).
target_compile_options(tranche_flags INTERFACE
  $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Wpedantic -Wnon-virtual-dtor -Woverloaded-virtual
                               -Wstrict-aliasing=2 -Wno-restrict
                               -ffp-contract=off>
  $<$<AND:$<COMPILE_LANGUAGE:CXX>,$<BOOL:${TRANCHE_WERROR}>>:-Werror>)
if(CMAKE_UNITY_BUILD)
  # In unity builds every source is an included file, and GCC treats its anonymous namespaces as a header's.
  target_compile_options(tranche_flags INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-Wno-subobject-linkage>)
  # In unity builds units are large, and GCC spends a tenth of its time on garbage collection; it starts above 1 GB only.
  target_compile_options(tranche_flags INTERFACE $<$<COMPILE_LANG_AND_ID:CXX,GNU>:--param=ggc-min-heapsize=1000000>)
endif()
if(TRANCHE_SANITIZE)
  target_compile_options(tranche_flags INTERFACE
    "$<$<COMPILE_LANGUAGE:C,CXX>:-fsanitize=${TRANCHE_SANITIZE};-fno-omit-frame-pointer;-fno-sanitize-recover=all>")
  # The check of every pointer (alignment, null) doubles compile time, so it is on only for folders that interpret memory written by others
  # (see tranche_library). AddressSanitizer reports accesses at null in any case.
  target_compile_options(tranche_flags INTERFACE
    "$<$<AND:$<COMPILE_LANGUAGE:C,CXX>,$<NOT:$<BOOL:$<TARGET_PROPERTY:TRANCHE_POINTER_CHECKS>>>>:-fno-sanitize=null,alignment>")
  target_link_options(tranche_flags INTERFACE -fsanitize=${TRANCHE_SANITIZE})
endif()
find_program(tranche_mold mold)
if(tranche_mold AND PROJECT_IS_TOP_LEVEL)
  target_link_options(tranche_flags INTERFACE -fuse-ld=mold)
endif()
