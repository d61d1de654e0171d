# tranche::tranche, the one target that users link, and the rules that install and export it.
get_property(tranche_public_libraries GLOBAL PROPERTY tranche_libraries)
list(REMOVE_ITEM tranche_public_libraries tranche_tools)  # the program's library is tranche::tools, for users who want it

add_library(tranche_all INTERFACE)
add_library(tranche::tranche ALIAS tranche_all)
set_target_properties(tranche_all PROPERTIES EXPORT_NAME tranche)
list(REVERSE tranche_public_libraries)  # static linkers need users before the libraries that they use
target_link_libraries(tranche_all INTERFACE ${tranche_public_libraries})
if(tranche_has_MPI)
  target_link_libraries(tranche_all INTERFACE MPI::MPI_C)  # <tranche/comm/mpi.h> uses MPI_Comm
endif()

if(NOT TRANCHE_INSTALL)
  return()
endif()
if(TRANCHE_SANITIZE)
  return()  # users would need the same sanitizer
endif()
if(tranche_cuda_emulated)
  return()  # for tests only
endif()
include(CMakePackageConfigHelpers)

install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/ DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} FILES_MATCHING PATTERN "*.h")

# An example project, and the script that runs mpirun as root and in containers.
file(GLOB tranche_example_sources ${PROJECT_SOURCE_DIR}/examples/*.cpp)
install(FILES ${tranche_example_sources} ${PROJECT_SOURCE_DIR}/examples/project/CMakeLists.txt
        DESTINATION ${CMAKE_INSTALL_DATADIR}/tranche/examples)
install(PROGRAMS ${PROJECT_SOURCE_DIR}/scripts/run_mpi.sh ${PROJECT_SOURCE_DIR}/scripts/quickstart.sh
        ${PROJECT_SOURCE_DIR}/scripts/quickstart_text.sh ${PROJECT_SOURCE_DIR}/scripts/dictionary_text.py
        DESTINATION ${CMAKE_INSTALL_DATADIR}/tranche)
install(FILES ${PROJECT_SOURCE_DIR}/scripts/quickstart.json DESTINATION ${CMAKE_INSTALL_DATADIR}/tranche)
install(PROGRAMS ${PROJECT_SOURCE_DIR}/scripts/slurm/mpirun.sbatch ${PROJECT_SOURCE_DIR}/scripts/slurm/srun.sbatch
        DESTINATION ${CMAKE_INSTALL_DATADIR}/tranche/slurm)

set(tranche_config_dir ${CMAKE_INSTALL_LIBDIR}/cmake/tranche)
set(tranche_cuda_libraries)
if(tranche_has_CUDA)
  list(APPEND tranche_cuda_libraries tranche_cuda_runtime tranche_cublas)
endif()
if(tranche_has_NCCL)
  list(APPEND tranche_cuda_libraries tranche_nccl)
endif()
install(TARGETS tranche_all ${tranche_public_libraries} tranche_tools ${tranche_cuda_libraries} EXPORT tranche-targets
        ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR} LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(EXPORT tranche-targets NAMESPACE tranche:: DESTINATION ${tranche_config_dir})
configure_package_config_file(${PROJECT_SOURCE_DIR}/cmake/tranche-config.cmake.in
  ${PROJECT_BINARY_DIR}/tranche-config.cmake INSTALL_DESTINATION ${tranche_config_dir})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/tranche-config-version.cmake
  COMPATIBILITY SameMinorVersion)  # before 1.0 a minor version may change the interface
install(FILES ${PROJECT_BINARY_DIR}/tranche-config.cmake ${PROJECT_BINARY_DIR}/tranche-config-version.cmake
        ${PROJECT_SOURCE_DIR}/cmake/FindNCCL.cmake ${PROJECT_SOURCE_DIR}/cmake/FindHDF5Serial.cmake
        ${PROJECT_SOURCE_DIR}/cmake/FindLibTorch.cmake
        ${PROJECT_SOURCE_DIR}/cmake/TrancheRules.cmake ${PROJECT_SOURCE_DIR}/kernels/rules/rule.cpp.in
        DESTINATION ${tranche_config_dir})
include(TranchePkgConfig)
include(TranchePackage)
