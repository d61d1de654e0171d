# Optimizers as single files (tranche/kernels/update_rule.h).
#   tranche_add_optimizer(<program> <file.h>...)
# adds a program's own optimizers. They have names in the configuration, and are sharded, offloaded, saved and planned like those of the library; the
# library's loops are compiled for them. Call it once for each program. No CUDA compiler is used: on GPUs such a rule updates
# in host memory (zero_optimization.offload_optimizer.device "cpu" or "nvme"), and is refused otherwise.
#
# tranche_rule_sources() adds the sources of <files> to <target>, and a source that defines <function>, their list. <gpu> is 1 if the target has GPU
# launches of these rules. Only the list names those, so that the loops are compiled alike with and without CUDA.
function(tranche_rule_sources target function gpu)
  set(template ${CMAKE_CURRENT_FUNCTION_LIST_DIR}/rule.cpp.in)  # the template of an installation
  if(NOT EXISTS ${template})
    set(template ${CMAKE_CURRENT_FUNCTION_LIST_DIR}/../kernels/rules/rule.cpp.in)
  endif()
  # Contraction would change bits. The options for vectorized loops do not: errno and traps are not used, and vectors may have any width.
  set(options -ffp-contract=off -fno-math-errno -fno-trapping-math $<$<CONFIG:Release>:-O3>)
  if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
    list(APPEND options -mprefer-vector-width=512)
  endif()
  set(rule_declarations)
  set(rule_calls)
  foreach(rule_file ${ARGN})
    get_filename_component(rule_file ${rule_file} ABSOLUTE)
    get_filename_component(rule_name ${rule_file} NAME_WE)
    set(rule_source ${CMAKE_CURRENT_BINARY_DIR}/rules/${rule_name}.cpp)
    configure_file(${template} ${rule_source} @ONLY)
    set_source_files_properties(${rule_source} PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON
      COMPILE_OPTIONS "${options}")
    target_sources(${target} PRIVATE ${rule_source})
    set(rule_launches)
    set(rule_launch_list "{}")
    if(gpu)
      set(rule_launches " std::span<const RuleLaunch> launches_of_file();")
      set(rule_launch_list "rules::${rule_name}::launches_of_file()")
    endif()
    string(APPEND rule_declarations
      "namespace tranche::rules::${rule_name} { std::span<const UpdateRule> rules_of_file();${rule_launches} }\n")
    string(APPEND rule_calls "    add(rules::${rule_name}::rules_of_file(), ${rule_launch_list});\n")
  endforeach()
  set(rule_list ${CMAKE_CURRENT_BINARY_DIR}/rules/list_of_rules.cpp)
  file(CONFIGURE OUTPUT ${rule_list} @ONLY CONTENT "// Written by CMake: the list of rules.
#include <cstddef>
#include <span>
#include <vector>

#include \"tranche/kernels/optimizer_update.h\"

@rule_declarations@
namespace tranche::kernels {
std::span<const UpdateRule* const> @function@() {
  static const std::vector<UpdateRule> rules = [] {
    std::vector<UpdateRule> all;
    const auto add = [&](std::span<const UpdateRule> of_file, std::span<const RuleLaunch> launches) {
      for (std::size_t i = 0; i < of_file.size(); ++i) {
        all.push_back(of_file[i]);
        if (!launches.empty()) all.back().launch = launches[i];
      }
    };
@rule_calls@    return all;
  }();
  static const std::vector<const UpdateRule*> list = [] {
    std::vector<const UpdateRule*> all;
    for (const UpdateRule& rule : rules) all.push_back(&rule);
    return all;
  }();
  return list;
}
}  // namespace tranche::kernels
")
  # The list is written again when CUDA is added, so it is a unit of its own.
  set_source_files_properties(${rule_list} PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
  target_sources(${target} PRIVATE ${rule_list})
endfunction()

function(tranche_add_optimizer target)
  if(NOT ARGN)
    message(FATAL_ERROR "tranche_add_optimizer(${target}) names no file")
  endif()
  get_target_property(kind ${target} TYPE)
  if(NOT kind STREQUAL "EXECUTABLE")
    message(FATAL_ERROR "tranche_add_optimizer: ${target} is no program but a ${kind}: an optimizer is part of a program")
  endif()
  get_target_property(before ${target} TRANCHE_OPTIMIZERS)
  if(before)
    message(FATAL_ERROR "tranche_add_optimizer: ${target} has optimizers already; name all files in one call")
  endif()
  set_target_properties(${target} PROPERTIES TRANCHE_OPTIMIZERS "${ARGN}")
  if(TARGET hwy::hwy)
    target_link_libraries(${target} PRIVATE hwy::hwy)
  endif()
  tranche_rule_sources(${target} rules_of_program 0 ${ARGN})
endfunction()
