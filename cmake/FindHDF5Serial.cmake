# Finds the serial HDF5 library through pkg-config's hdf5-serial, never plain "hdf5", which is the MPI variant where
# both are installed. Takes the static archive where there is one: the shared library draws in libcurl and libcrypto.
# Defines HDF5Serial_FOUND, HDF5Serial_VERSION and the target HDF5::serial.
find_package(PkgConfig QUIET)
pkg_check_modules(HDF5Serial_pc QUIET hdf5-serial)
set(HDF5Serial_VERSION "${HDF5Serial_pc_VERSION}")
find_path(HDF5Serial_INCLUDE_DIR hdf5.h HINTS ${HDF5Serial_pc_INCLUDE_DIRS} NO_DEFAULT_PATH)
find_library(HDF5Serial_LIBRARY NAMES libhdf5.a hdf5 HINTS ${HDF5Serial_pc_LIBRARY_DIRS} NO_DEFAULT_PATH)
set(HDF5Serial_extra_found TRUE)
set(HDF5Serial_extra)
if(HDF5Serial_LIBRARY MATCHES "\\.a$")
  # Compression that Tranche does not use, but which the archive refers to.
  foreach(name z sz)
    find_library(HDF5Serial_${name}_LIBRARY NAMES ${name})
    mark_as_advanced(HDF5Serial_${name}_LIBRARY)
    if(HDF5Serial_${name}_LIBRARY)
      list(APPEND HDF5Serial_extra ${HDF5Serial_${name}_LIBRARY})
    else()
      set(HDF5Serial_extra_found FALSE)
    endif()
  endforeach()
  list(APPEND HDF5Serial_extra ${CMAKE_DL_LIBS} m)
endif()

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(HDF5Serial
  REQUIRED_VARS HDF5Serial_LIBRARY HDF5Serial_INCLUDE_DIR HDF5Serial_extra_found VERSION_VAR HDF5Serial_VERSION
  REASON_FAILURE_MESSAGE "the serial HDF5 with its headers is Debian's package libhdf5-dev (scripts/setup.sh)")
mark_as_advanced(HDF5Serial_LIBRARY HDF5Serial_INCLUDE_DIR)

if(HDF5Serial_FOUND AND NOT TARGET HDF5::serial)
  add_library(HDF5::serial UNKNOWN IMPORTED GLOBAL)
  set_target_properties(HDF5::serial PROPERTIES
    IMPORTED_LOCATION ${HDF5Serial_LIBRARY}
    INTERFACE_INCLUDE_DIRECTORIES ${HDF5Serial_INCLUDE_DIR}
    INTERFACE_LINK_LIBRARIES "${HDF5Serial_extra}")
endif()
