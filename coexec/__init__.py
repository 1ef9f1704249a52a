from coexec.options import options
from coexec.tape import GradientTape
