# Finds the serial HDF5 library. On Debian it is installed beside the MPI variant; pkg-config finds it as hdf5-serial, whereas plain "hdf5"
# is the MPI variant if both are installed. Static libraries of ours link its static archive if there is one, because its shared library
# depends on libcurl and libcrypto. The archive's code cannot be part of a shared library (HDF5Serial_SHARED). Other systems have one HDF5,
# which CMake's own module finds (HDF5_ROOT names its folder). Defines HDF5Serial_FOUND, HDF5Serial_VERSION and the target HDF5::serial.
find_package(PkgConfig QUIET)
pkg_check_modules(HDF5Serial_pc QUIET hdf5-serial)
set(HDF5Serial_reason "the serial HDF5 with its headers was not found: it is Debian's package libhdf5-dev \
(scripts/setup.sh), hdf5-devel or hdf5 elsewhere (-DHDF5_ROOT=FOLDER says where one lies)")
set(HDF5Serial_usable TRUE)
set(HDF5Serial_extra)
if(HDF5Serial_pc_FOUND)
  set(HDF5Serial_VERSION "${HDF5Serial_pc_VERSION}")
  find_path(HDF5Serial_INCLUDE_DIR hdf5.h HINTS ${HDF5Serial_pc_INCLUDE_DIRS} NO_DEFAULT_PATH)
  set(HDF5Serial_names libhdf5.a hdf5)
  if(HDF5Serial_SHARED)
    set(HDF5Serial_names hdf5)
  endif()
  find_library(HDF5Serial_LIBRARY NAMES ${HDF5Serial_names} HINTS ${HDF5Serial_pc_LIBRARY_DIRS} NO_DEFAULT_PATH)
  mark_as_advanced(HDF5Serial_LIBRARY HDF5Serial_INCLUDE_DIR)
  set(HDF5Serial_libraries ${HDF5Serial_LIBRARY})
  set(HDF5Serial_includes ${HDF5Serial_INCLUDE_DIR})
  if(HDF5Serial_LIBRARY MATCHES "\\.a$")
    # Compression libraries that Tranche does not use, but to which the archive refers.
    foreach(name z sz)
      find_library(HDF5Serial_${name}_LIBRARY NAMES ${name})
      mark_as_advanced(HDF5Serial_${name}_LIBRARY)
      if(HDF5Serial_${name}_LIBRARY)
        list(APPEND HDF5Serial_extra ${HDF5Serial_${name}_LIBRARY})
      else()
        set(HDF5Serial_usable FALSE)
        set(HDF5Serial_reason "${HDF5Serial_LIBRARY} needs the library '${name}', which was not found")
      endif()
    endforeach()
    list(APPEND HDF5Serial_extra ${CMAKE_DL_LIBS} m)
  endif()
else()
  get_property(HDF5Serial_languages GLOBAL PROPERTY ENABLED_LANGUAGES)
  if(NOT C IN_LIST HDF5Serial_languages)
    enable_language(C)  # CMake's module looks for a C library
  endif()
  find_package(HDF5 QUIET COMPONENTS C)
  set(HDF5Serial_VERSION "${HDF5_VERSION}")
  set(HDF5Serial_libraries ${HDF5_C_LIBRARIES})
  set(HDF5Serial_includes ${HDF5_C_INCLUDE_DIRS} ${HDF5_INCLUDE_DIRS})
  list(REMOVE_DUPLICATES HDF5Serial_includes)
  if(HDF5_IS_PARALLEL)
    set(HDF5Serial_usable FALSE)
    set(HDF5Serial_reason "the HDF5 that was found (${HDF5_C_LIBRARIES}) is the MPI variant, and checkpoints are written \
by the serial one (-DHDF5_ROOT=FOLDER says where one lies)")
  endif()
endif()

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(HDF5Serial
  REQUIRED_VARS HDF5Serial_libraries HDF5Serial_includes HDF5Serial_usable VERSION_VAR HDF5Serial_VERSION
  REASON_FAILURE_MESSAGE "${HDF5Serial_reason}")

if(HDF5Serial_FOUND AND NOT TARGET HDF5::serial)
  add_library(HDF5::serial INTERFACE IMPORTED GLOBAL)
  set_target_properties(HDF5::serial PROPERTIES
    INTERFACE_INCLUDE_DIRECTORIES "${HDF5Serial_includes}"
    INTERFACE_LINK_LIBRARIES "${HDF5Serial_libraries};${HDF5Serial_extra}")
endif()
