# tranche_test(<name> SOURCES ... [LINK ...] [LABELS unit|mpi|gpu|slow ...] [TIMEOUT s] [MPI_RANKS n ...])
# One GoogleTest program. Without MPI_RANKS every case is a CTest test; with it the program runs whole under
# mpirun once for each rank count. The target <label>_tests builds all programs of a label.
find_package(GTest REQUIRED)
include(GoogleTest)
foreach(label unit gpu)  # asked for by name, also where they are empty
  add_custom_target(${label}_tests)
endforeach()

function(tranche_test name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "TIMEOUT" "SOURCES;LINK;LABELS;MPI_RANKS")
  if(NOT arg_LABELS)
    set(arg_LABELS unit)
  endif()
  if(NOT arg_TIMEOUT)
    set(arg_TIMEOUT 120)
  endif()
  add_executable(${name} ${arg_SOURCES})
  target_link_libraries(${name} PRIVATE ${arg_LINK} GTest::gmock tranche_flags)
  if(TRANCHE_SANITIZE)
    target_compile_options(${name} PRIVATE -O0)  # compiles in half the time; what is tested is optimised all the same
  endif()
  foreach(label ${arg_LABELS})
    if(NOT TARGET ${label}_tests)
      add_custom_target(${label}_tests)
    endif()
    add_dependencies(${label}_tests ${name})
  endforeach()
  set_target_properties(${name} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/tests)
  if(arg_MPI_RANKS)
    foreach(ranks ${arg_MPI_RANKS})
      add_test(NAME ${name}.ranks${ranks}
        COMMAND ${PROJECT_SOURCE_DIR}/scripts/run_mpi.sh ${ranks} $<TARGET_FILE:${name}>)
      set_tests_properties(${name}.ranks${ranks} PROPERTIES LABELS "${arg_LABELS}" TIMEOUT ${arg_TIMEOUT}
                           PROCESSORS ${ranks})
    endforeach()
  else()
    target_link_libraries(${name} PRIVATE GTest::gtest_main)
    gtest_discover_tests(${name} TEST_PREFIX "${name}." DISCOVERY_MODE PRE_TEST DISCOVERY_TIMEOUT 60
                         PROPERTIES LABELS "${arg_LABELS}" TIMEOUT ${arg_TIMEOUT})
  endif()
endfunction()
