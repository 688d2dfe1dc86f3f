{{- define "octavo.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "octavo.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 50 | trimSuffix "-" -}}
{{- else if contains (include "octavo.name" .) .Release.Name -}}
{{- printf "%s-operator" .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s-operator" .Release.Name (include "octavo.name" .) | trunc 50 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- /* Name of what is not in the release's own namespace: releases of one name in two namespaces do not collide. */ -}}
{{- define "octavo.clusterName" -}}
{{- printf "%s-%s" (include "octavo.fullname" .) .Release.Namespace -}}
{{- end -}}

{{- define "octavo.selectorLabels" -}}
app.kubernetes.io/name: {{ include "octavo.name" . }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/component: operator
{{- end -}}

{{- /* What a pod of ours is selected by, and the user's labels beside it; where both name one, ours is kept. */ -}}
{{- define "octavo.podLabels" -}}
{{ toYaml (merge (include "octavo.selectorLabels" . | fromYaml) (default dict .Values.podLabels)) }}
{{- end -}}

{{- define "octavo.labels" -}}
{{ include "octavo.labelsWith" (list . dict) }}
{{- end -}}

{{- /* Labels of one object, with some of its own. Takes (list context labels). A label twice is no valid YAML. */ -}}
{{- define "octavo.labelsWith" -}}
{{- $context := index . 0 -}}{{- $more := index . 1 -}}
{{- $ours := merge (include "octavo.selectorLabels" $context | fromYaml) (dict
  "app.kubernetes.io/version" $context.Chart.AppVersion
  "app.kubernetes.io/part-of" "octavo"
  "app.kubernetes.io/managed-by" $context.Release.Service
  "helm.sh/chart" (printf "%s-%s" $context.Chart.Name $context.Chart.Version | replace "+" "_")) -}}
{{ toYaml (merge $ours (default dict $more) (default dict $context.Values.commonLabels)) }}
{{- end -}}

{{- define "octavo.serviceAccountName" -}}
{{- if .Values.serviceAccount.name -}}
{{- .Values.serviceAccount.name -}}
{{- else if .Values.serviceAccount.create -}}
{{- include "octavo.fullname" . -}}
{{- else -}}
{{- fail "serviceAccount.create is false: say which one to use by serviceAccount.name" -}}
{{- end -}}
{{- end -}}

{{- /* Image by digest, else by tag, else by the chart's appVersion. Takes (list image context). */ -}}
{{- define "octavo.image" -}}
{{- $image := index . 0 -}}{{- $context := index . 1 -}}
{{- if $image.digest -}}
{{- printf "%s@%s" $image.repository $image.digest -}}
{{- else -}}
{{- printf "%s:%s" $image.repository (default $context.Chart.AppVersion $image.tag) -}}
{{- end -}}
{{- end -}}

{{- /* The Service behind which the replica that works can be asked. */ -}}
{{- define "octavo.metricsService" -}}
{{- printf "%s-metrics" (include "octavo.fullname" .) -}}
{{- end -}}

{{- /* The ClusterRole for the API of the whole cluster that the operator serves. */ -}}
{{- define "octavo.metricsRole" -}}
{{- printf "%s-metrics" (include "octavo.clusterName" .) -}}
{{- end -}}

{{- /* "true" where the operator may serve an API of the whole cluster. */ -}}
{{- define "octavo.metricsApi" -}}
{{- if and .Values.metricsApi.enabled (not .Values.watchNamespaces) -}}true{{- else -}}false{{- end -}}
{{- end -}}

{{- /* What the operator may do in the namespaces that it serves. Secrets are never read: pods refer to them by name. */ -}}
{{- define "octavo.servingRules" -}}
- apiGroups: [octavo.dev]
  resources: [llmdeployments]
  verbs: [get, list, watch]
- apiGroups: [octavo.dev]
  resources: [llmdeployments/status]
  verbs: [patch]
- apiGroups: [""]
  resources: [services, serviceaccounts, persistentvolumeclaims]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [apps]
  resources: [deployments]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [autoscaling]
  resources: [horizontalpodautoscalers]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [keda.sh]
  resources: [scaledobjects]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [monitoring.coreos.com]
  resources: [podmonitors, servicemonitors]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [""]
  resources: [pods]
  verbs: [list, watch]
- apiGroups: [""]
  resources: [events]
  verbs: [create, list]
# Does another operator that has claimed an LLMDeployment still live?
- apiGroups: [coordination.k8s.io]
  resources: [leases]
  verbs: [get]
{{- end -}}
