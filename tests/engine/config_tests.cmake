# Configuration, model description and budgets; apart from the engine's own tests, which need its other sources.
set(here ${CMAKE_CURRENT_LIST_DIR})
tranche_test(test_engine_config
  SOURCES ${here}/config_test.cpp ${here}/config_keys_test.cpp ${here}/config_notes_test.cpp ${here}/offload_share_test.cpp
          ${here}/model_spec_test.cpp ${here}/runtime_test.cpp
  ALONE ${here}/config_check_test.cpp ${here}/config_files_test.cpp ${here}/config_offload_test.cpp
  LINK tranche::engine nlohmann_json::nlohmann_json fmt::fmt
  LABELS unit)
target_compile_definitions(test_engine_config PRIVATE TRANCHE_DOCS="${PROJECT_SOURCE_DIR}/docs/reference"
                           TRANCHE_CONFIGS="${PROJECT_SOURCE_DIR}/tests/configs")
