# cmake -DMODE=installed|subdirectory -DBUILD= -DSOURCE= -DWORK= ... -P run.cmake
function(run)
  execute_process(COMMAND ${ARGV} RESULT_VARIABLE status OUTPUT_VARIABLE output ERROR_VARIABLE output)
  if(NOT status EQUAL 0)
    list(JOIN ARGV " " line)
    message(FATAL_ERROR "status ${status} from: ${line}\n${output}")
  endif()
  set(output "${output}" PARENT_SCOPE)
endfunction()

set(options -G ${GENERATOR} -DCMAKE_CXX_COMPILER=${COMPILER} -DCMAKE_CXX_COMPILER_LAUNCHER=${LAUNCHER})
if(MODE STREQUAL "installed")
  # Afresh, so that a header or library that is no longer installed is missed; the build may not be of help.
  file(REMOVE_RECURSE ${WORK})
  run(${CMAKE_COMMAND} --install ${BUILD} --prefix ${WORK}/staging)
  file(RENAME ${WORK}/staging ${WORK}/prefix)  # an installation can be moved
  list(APPEND options -DCMAKE_PREFIX_PATH=${WORK}/prefix -DEXAMPLE=${SOURCE}/examples/training_rule.cpp)
  file(GLOB_RECURSE installed ${WORK}/prefix/*.cmake)
  foreach(file ${installed})
    file(READ ${file} text)
    foreach(place ${BUILD} ${SOURCE})
      string(FIND "${text}" "${place}" position)
      if(NOT position EQUAL -1)
        message(FATAL_ERROR "${file} names ${place}, which users do not have")
      endif()
    endforeach()
  endforeach()
else()
  # The smallest build, so that it is quick: plain kernels for one instruction set, no backends, no optimisation, few
  # units.
  list(APPEND options -DTRANCHE_SOURCE=${SOURCE} -DCMAKE_BUILD_TYPE=Debug
       "-DCMAKE_CXX_FLAGS_DEBUG=-O0 -DHWY_COMPILE_ONLY_STATIC"
       -DTRANCHE_PLAIN_KERNELS=ON -DCMAKE_UNITY_BUILD=ON -DCMAKE_UNITY_BUILD_BATCH_SIZE=32
       -DTRANCHE_MPI=OFF -DTRANCHE_CUDA=OFF -DTRANCHE_URING=OFF)
endif()
run(${CMAKE_COMMAND} -S ${SOURCE}/tests/consumer/project -B ${WORK}/build ${options})
run(${CMAKE_COMMAND} --build ${WORK}/build --parallel 1 --target consumer)
if(MODE STREQUAL "installed")
  run(${WORK}/build/example)
  if(NOT output MATCHES "steps 240 applied")
    message(FATAL_ERROR "the example printed something else: ${output}")
  endif()
endif()
run(${WORK}/build/consumer)
message("${output}")
if(NOT output MATCHES "tranche [0-9.]+ trains: yes.*refused: .*fp31")
  message(FATAL_ERROR "the consumer printed something else: ${output}")
endif()
