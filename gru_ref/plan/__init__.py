"""What a configuration will need, before anything is allocated: parameters, bytes, FLOPs, time, cost.

`summary` puts it all together for `gru-ref plan`; memory.py, flops.py, devices.py and speed.py are its parts.
"""

from gru_ref.plan.devices import DEVICES as DEVICES
from gru_ref.plan.devices import Device as Device
from gru_ref.plan.devices import device as device
from gru_ref.plan.flops import FORMULA as FORMULA
from gru_ref.plan.flops import flops_per_token as flops_per_token
from gru_ref.plan.memory import Fit as Fit
from gru_ref.plan.memory import Parameter as Parameter
from gru_ref.plan.memory import checkpoint_bytes as checkpoint_bytes
from gru_ref.plan.memory import fits as fits
from gru_ref.plan.memory import memory as memory
from gru_ref.plan.memory import parameters as parameters
from gru_ref.plan.speed import Speed as Speed
from gru_ref.plan.speed import measure_here as measure_here
from gru_ref.plan.speed import predict_on as predict_on
from gru_ref.plan.summary import summary as summary
