# cmake -DRUN=run_mpi.sh -DRANKS=N -DPROGRAM=libtorch_throwing -P out_of_memory.cmake
# Each rank waits there until all have printed their errors (tests/comm/errors_of_ranks.h).
set(ENV{TRANCHE_TEST_ERRORS} ${CMAKE_CURRENT_BINARY_DIR}/errors_of_${RANKS})
file(REMOVE_RECURSE $ENV{TRANCHE_TEST_ERRORS})
file(MAKE_DIRECTORY $ENV{TRANCHE_TEST_ERRORS})
execute_process(COMMAND ${RUN} ${RANKS} ${PROGRAM} memory inside RESULT_VARIABLE status OUTPUT_VARIABLE output ERROR_VARIABLE output)
if(NOT status EQUAL 3)
  message(FATAL_ERROR "status ${status}, wanted 3, from:\n${output}")
endif()
math(EXPR last "${RANKS} - 1")
foreach(rank RANGE ${last})
  if(NOT output MATCHES "rank ${rank} ends with 3")
    message(FATAL_ERROR "rank ${rank} did not end with 3:\n${output}")
  endif()
endforeach()
# The message names the allocation and the unit whose backward pass made it, and the memory table follows.
if(NOT output MATCHES "backward of stages.2: 'torch' .activations. asks for 256.00 MiB" OR
   NOT output MATCHES "workspace +[0-9.]+ MiB")
  message(FATAL_ERROR "the text has no cause or no table:\n${output}")
endif()
message("${output}")
