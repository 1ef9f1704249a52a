#include "program.h"

#include <ATen/ScalarOps.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/jit/python/pybind_utils.h>

#include <algorithm>

namespace py = pybind11;

namespace coexec {

namespace {

// A Python number in a tensor's place doesn't take part in type promotion as a tensor would.
at::Tensor wrapped_number(const at::Scalar& number) {
  at::Tensor tensor = c10::scalar_to_tensor(number);
  tensor.unsafeGetTensorImpl()->set_wrapped_number(true);
  return tensor;
}

bool is_tensor_type(const c10::TypePtr& type) {
  if (auto optional = type->cast<c10::OptionalType>()) return is_tensor_type(optional->getElementType());
  return type->kind() == c10::TypeKind::TensorType;
}

}  // namespace

bool Argument::reads(const std::function<bool(int64_t)>& matches) const {
  if (kind == Kind::Register) return matches(reg);
  return std::any_of(elements.begin(), elements.end(), [&](const Argument& e) { return e.reads(matches); });
}

c10::IValue Argument::resolve(const std::vector<c10::IValue>& registers, const Symbols& symbols) const {
  switch (kind) {
    case Kind::Constant:
      return constant;
    case Kind::Register: {
      const c10::IValue& value = registers[reg];
      return wants_tensor && value.isScalar() ? wrapped_number(value.toScalar()) : value;
    }
    case Kind::Varying: {
      auto value = size.value(symbols);
      TORCH_CHECK(value, "a size is none in this iteration");
      return wants_tensor ? c10::IValue(wrapped_number(*value)) : c10::IValue(*value);
    }
    case Kind::List: {
      if (element->kind() == c10::TypeKind::TensorType) {
        c10::List<at::Tensor> out;
        out.reserve(elements.size());
        for (const auto& e : elements) out.push_back(e.resolve(registers, symbols).toTensor());
        return out;
      }
      c10::impl::GenericList out(element);
      out.reserve(elements.size());
      for (const auto& e : elements) out.push_back(e.resolve(registers, symbols));
      return out;
    }
  }
  TORCH_INTERNAL_ASSERT(false);
}

namespace {

// Templates mark registers with ("r", index), sizes that vary with ("s", size) and lists that hold either with
// ("l", [...]);
// everything else arrives as ("c", value).
Argument parse_argument(const py::handle& encoded, const c10::TypePtr& type) {
  auto pair = encoded.cast<py::tuple>();
  auto tag = pair[0].cast<std::string>();
  Argument out;
  if (tag == "r") {
    out.kind = Argument::Kind::Register;
    out.reg = pair[1].cast<int64_t>();
    out.wants_tensor = is_tensor_type(type);
  } else if (tag == "s") {
    out.kind = Argument::Kind::Varying;
    out.size = size_of(pair[1]);
    out.wants_tensor = is_tensor_type(type);
  } else if (tag == "l") {
    c10::TypePtr list_type = type;
    if (auto optional = type->cast<c10::OptionalType>()) list_type = optional->getElementType();
    out.kind = Argument::Kind::List;
    out.element = list_type->expectRef<c10::ListType>().getElementType();
    for (const auto& e : pair[1].cast<py::list>()) out.elements.push_back(parse_argument(e, out.element));
  } else if (is_tensor_type(type) && py::isinstance<py::bool_>(pair[1])) {
    out.constant = wrapped_number(pair[1].cast<bool>());
  } else if (is_tensor_type(type) && py::isinstance<py::int_>(pair[1])) {
    out.constant = wrapped_number(pair[1].cast<int64_t>());
  } else if (is_tensor_type(type) && py::isinstance<py::float_>(pair[1])) {
    out.constant = wrapped_number(pair[1].cast<double>());
  } else if (is_tensor_type(type) && PyComplex_Check(pair[1].ptr())) {
    out.constant = wrapped_number(pair[1].cast<c10::complex<double>>());
  } else {
    out.constant = torch::jit::toIValue(pair[1], type);
  }
  return out;
}

void append_tensors(const c10::IValue& value, std::vector<c10::IValue>& out) {
  if (value.isTensorList()) {
    for (const at::Tensor& t : value.toTensorList()) out.emplace_back(t);
  } else {
    out.push_back(value);
  }
}

bool is_bernoulli(const Instruction& call) {
  const auto& name = call.op->operator_name();
  if (name.name != "aten::bernoulli_" || name.overload_name != "float" || call.outs.size() != 1) return false;
  const Argument &self = call.arguments[0], &p = call.arguments[1], &generator = call.arguments[2];
  bool is_constant = p.kind == Argument::Kind::Constant && p.constant.isDouble();
  if (!is_constant || !(p.constant.toDouble() >= 0 && p.constant.toDouble() <= 1)) return false;
  return self.kind == Argument::Kind::Register && generator.kind == Argument::Kind::Constant &&
         generator.constant.isNone();
}

}  // namespace

Instruction parse_instruction(const py::dict& d) {
  static const std::unordered_map<std::string, Opcode> opcodes = {
      {"Call", Opcode::Call},     {"Feed", Opcode::Feed},         {"Fetch", Opcode::Fetch},
      {"Move", Opcode::Move},     {"Switch", Opcode::Switch},     {"Jump", Opcode::Jump},
      {"Commit", Opcode::Commit}, {"Compiled", Opcode::Compiled}};
  Instruction out;
  out.opcode = opcodes.at(d["opcode"].cast<std::string>());
  out.when = static_cast<When>(d["when"].cast<int>());
  out.outs = d["outs"].cast<std::vector<int64_t>>();
  out.ins = d["ins"].cast<std::vector<int64_t>>();
  out.symbols = d["symbols"].cast<std::vector<int64_t>>();
  out.written = d["written"].cast<std::vector<int64_t>>();
  out.grad_mode = d["grad_mode"].cast<bool>();
  for (const auto& shape : d["shapes"].cast<py::list>()) {
    if (shape.is_none()) {
      out.shapes.emplace_back();
    } else {
      out.shapes.emplace_back(sizes_of(shape));
    }
  }
  out.slot = d["slot"].cast<int64_t>();
  out.copy = d["copy"].cast<bool>();
  out.draws = d["draws"].cast<bool>();
  out.targets = d["targets"].cast<std::vector<int64_t>>();
  out.release = d["release"].cast<std::vector<int64_t>>();
  out.where = d["where"].cast<std::string>();
  if (out.opcode == Opcode::Call) {
    out.op = c10::Dispatcher::singleton().findSchemaOrThrow(
        d["name"].cast<std::string>().c_str(), d["overload"].cast<std::string>().c_str());
    const auto& schema_arguments = out.op->schema().arguments();
    auto encoded = d["arguments"].cast<py::list>();
    TORCH_CHECK(encoded.size() == schema_arguments.size(), "argument count of ", out.op->schema().name());
    for (size_t i = 0; i < encoded.size(); ++i) {
      out.arguments.push_back(parse_argument(encoded[i], schema_arguments[i].type()));
    }
    out.bernoulli = is_bernoulli(out);
  } else if (out.opcode == Opcode::Compiled) {
    out.strides = d["strides"].cast<std::vector<std::optional<std::vector<int64_t>>>>();
    out.dtypes = d["dtypes"].cast<std::vector<int64_t>>();
    for (const auto& given : d["given"].cast<py::list>()) {
      auto [shape, strides, dtype] =
          given.cast<std::tuple<py::list, std::optional<std::vector<int64_t>>, int64_t>>();
      out.given.push_back(Given{sizes_of(shape), std::move(strides), dtype});
    }
    out.library = d["library"].cast<std::shared_ptr<Library>>();
  }
  return out;
}

std::shared_ptr<Program> make_program(
    int64_t register_count,
    std::vector<int64_t> captured,
    int64_t fetch_slots,
    int64_t symbols,
    int64_t threads,
    bool helped,
    const py::list& instructions) {
  auto program = std::make_shared<Program>();
  program->register_count = register_count;
  program->fetch_slots = fetch_slots;
  program->symbols = symbols;
  program->threads = threads;
  program->helped = helped;
  program->captured = std::move(captured);
  program->instructions.reserve(instructions.size());
  for (const auto& d : instructions) program->instructions.push_back(parse_instruction(d.cast<py::dict>()));
  for (size_t pc = 0; pc < program->instructions.size(); ++pc) {
    const Instruction& instruction = program->instructions[pc];
    program->branches |= instruction.opcode == Opcode::Switch;
    if (instruction.draws) program->draws_until = instruction.when == When::Now ? pc + 1 : program->instructions.size();
  }
  return program;
}

std::vector<c10::IValue> invoke(
    const Instruction& call, const std::vector<c10::IValue>& registers, const Symbols& symbols) {
  std::vector<c10::IValue> stack, results;
  stack.reserve(call.arguments.size());
  for (const Argument& argument : call.arguments) stack.push_back(argument.resolve(registers, symbols));
  at::AutoGradMode grad_mode(call.grad_mode);
  call.op->callBoxed(stack);
  for (const auto& value : stack) append_tensors(value, results);
  return results;
}

}  // namespace coexec
