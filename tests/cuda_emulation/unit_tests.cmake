# These tests cover the emulation itself and are built only with TRANCHE_CUDA=EMULATED.
set(cuda_emulation_tests ${CMAKE_CURRENT_LIST_DIR})
tranche_test(test_cuda_emulation
  SOURCES
    ${cuda_emulation_tests}/cublaslt_test.cpp
    ${cuda_emulation_tests}/runtime_test.cpp
    ${cuda_emulation_tests}/simt_test.cpp
  LINK tranche_cuda_emulation fmt::fmt
  LABELS unit)
if(tranche_has_NCCL)
  target_sources(test_cuda_emulation PRIVATE ${cuda_emulation_tests}/nccl_test.cpp)
endif()
set_source_files_properties(${cuda_emulation_tests}/simt_test.cpp PROPERTIES COMPILE_OPTIONS
  "-include;${PROJECT_SOURCE_DIR}/tests/cuda_emulation/cuda_emulation.h;-Wno-unknown-pragmas")
