# tranche_test(<name> SOURCES ... [ALONE ...] [LINK ...] [LABELS unit|mpi|gpu|slow ...] [TIMEOUT s] [MPI_RANKS n ...]
#              [SHARDS n] [LOOPS] [SLOW_CASES] [AS_ON_GPU filter])
# One GoogleTest program. Without MPI_RANKS every case is a CTest test (with TRANCHE_WHOLE_TESTS and in sanitized builds
# the program is one, as starting a process that links all libraries costs more than most cases); with it the program
# runs whole under mpirun once for each rank count. SHARDS says in how many tests a sanitized program's cases are run,
# for those that take longest: so all cores stay busy to the end. LOOPS says that the test's own loops take longest:
# compiled with optimisation. Sources under ALONE stay units of their own in a unity build (see tranche_library).
# With SLOW_CASES, suites whose names end in Slow have the label slow instead. The target <label>_tests builds all
# programs of a label. AS_ON_GPU names the cases that take other sizes or comparisons on a GPU than on its emulation
# (tests/device/as_on_gpu.h): where GPUs are emulated, one more test, <name>.as_on_gpu, runs these as a GPU would.
# Programs of the label gpu end at a CUDA error that stays, and at a case that hangs (tests/device/gpu_cases.h).
find_package(GTest REQUIRED)
include(GoogleTest)
if(CMAKE_UNITY_BUILD)
  # Before anything is compiled, since everything is on top of core.
  find_package(Python3 REQUIRED COMPONENTS Interpreter)
  add_custom_target(name_check ALL
    COMMAND Python3::Interpreter ${PROJECT_SOURCE_DIR}/scripts/check_names.py ${PROJECT_BINARY_DIR})
  add_dependencies(tranche_core name_check)
endif()
foreach(label unit gpu)  # asked for by name, also where they are empty
  add_custom_target(${label}_tests)
endforeach()

function(tranche_test name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "SLOW_CASES;LOOPS" "TIMEOUT;SHARDS;AS_ON_GPU" "SOURCES;ALONE;LINK;LABELS;MPI_RANKS")
  if(arg_ALONE)
    set_source_files_properties(${arg_ALONE} PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
    list(APPEND arg_SOURCES ${arg_ALONE})
  endif()
  if(NOT arg_LABELS)
    set(arg_LABELS unit)
  endif()
  if(NOT arg_TIMEOUT)
    set(arg_TIMEOUT 120)
  endif()
  add_executable(${name} ${arg_SOURCES})
  target_link_libraries(${name} PRIVATE ${arg_LINK} GTest::gmock tranche_flags)
  if("gpu" IN_LIST arg_LABELS AND tranche_has_CUDA)
    target_link_libraries(${name} PRIVATE gpu_cases)
  endif()
  # Compiles in half to two thirds of the time; what is tested is optimised all the same.
  if(TRANCHE_SANITIZE)
    target_compile_options(${name} PRIVATE -O0)
  elseif(arg_LOOPS)
    target_compile_options(${name} PRIVATE $<$<CONFIG:Release>:-O1>)
  else()
    target_compile_options(${name} PRIVATE $<$<CONFIG:Release>:-O0>)
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
    if(arg_AS_ON_GPU AND tranche_cuda_emulated)
      add_test(NAME ${name}.as_on_gpu COMMAND ${name} --gtest_brief=1)
      set_tests_properties(${name}.as_on_gpu PROPERTIES LABELS "${arg_LABELS}" TIMEOUT 300 ENVIRONMENT
                           "TRANCHE_TEST_AS_ON_GPU=1;GTEST_FILTER=${arg_AS_ON_GPU}")
    endif()
    set(quick)
    if(arg_SLOW_CASES)
      set(quick TEST_FILTER "-*Slow.*")
    endif()
    if(TRANCHE_SANITIZE OR TRANCHE_WHOLE_TESTS)
      if(arg_SLOW_CASES)
        add_test(NAME ${name}.slow COMMAND ${name} --gtest_brief=1 --gtest_filter=*Slow.*)
        set_tests_properties(${name}.slow PROPERTIES LABELS slow TIMEOUT 3600)
        set(quick "--gtest_filter=-*Slow.*")
      endif()
      if(NOT arg_SHARDS OR NOT TRANCHE_SANITIZE)
        add_test(NAME ${name} COMMAND ${name} --gtest_brief=1 ${quick})
        set_tests_properties(${name} PROPERTIES LABELS "${arg_LABELS}" TIMEOUT 900)
        if(arg_SHARDS)
          set_tests_properties(${name} PROPERTIES COST 100)  # first
        endif()
        return()
      endif()
      foreach(shard RANGE 1 ${arg_SHARDS})
        math(EXPR index "${shard} - 1")
        add_test(NAME ${name}.shard${shard} COMMAND ${name} --gtest_brief=1 ${quick})
        set_tests_properties(${name}.shard${shard} PROPERTIES LABELS "${arg_LABELS}" TIMEOUT 900 COST 100  # first
                             ENVIRONMENT "GTEST_TOTAL_SHARDS=${arg_SHARDS};GTEST_SHARD_INDEX=${index}")
      endforeach()
      return()
    endif()
    if(arg_SLOW_CASES)
      gtest_discover_tests(${name} TEST_FILTER "*Slow.*" TEST_LIST ${name}_slow_cases TEST_PREFIX "${name}."
                           DISCOVERY_MODE PRE_TEST DISCOVERY_TIMEOUT 60 PROPERTIES LABELS slow TIMEOUT 900)
    endif()
    gtest_discover_tests(${name} ${quick} TEST_PREFIX "${name}." DISCOVERY_MODE PRE_TEST DISCOVERY_TIMEOUT 60
                         PROPERTIES LABELS "${arg_LABELS}" TIMEOUT ${arg_TIMEOUT})
  endif()
endfunction()
